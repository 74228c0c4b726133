"""Start a preloader (`program.py`), hold it, and let it fork a child."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tf4slurm.preload import messages
from tf4slurm.preload.environ import compared

_PROGRAM = Path(__file__).with_name("program.py")
_SWITCHES = frozenset("uOBEsSIdqbvP")
_WITH_VALUE = ("-W", "-X")
_ANSWER_SECONDS = 2.0  # from a preloader that has imported everything
_CLEAN_SECONDS = 2.0
_BACKLOG = 128
_LOST = -signal.SIGKILL


class NotPreloaded(Exception):  # noqa: N818 - it is no failure
    """A child was not forked. The text is a clause that says why."""


@dataclass(frozen=True)
class PythonCommand:
    """A command that runs a script or a module with Python.

    Attributes:
        interpreter: The interpreter and its options.
        script: Path of the script, or None.
        module: Name of the module after -m, or None.
        arguments: The arguments of the script or module.
    """

    interpreter: tuple[str, ...]
    script: str | None
    module: str | None
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, command: Sequence[str]) -> PythonCommand:
        """Return the parts of a command.

        Raises:
            NotPreloaded: The command is another program, or has an option of Python that a preloader does not support.
        """
        if not Path(command[0]).name.startswith("python"):
            raise NotPreloaded(f"{command[0]} is not Python")
        words, interpreter = list(command[1:]), [command[0]]
        while words:
            word = words.pop(0)
            if word == "-m" and words:
                return cls(tuple(interpreter), None, words[0], tuple(words[1:]))
            if not word.startswith("-"):
                return cls(tuple(interpreter), word, None, tuple(words))
            interpreter.append(word)
            if word in _WITH_VALUE and words:
                interpreter.append(words.pop(0))
            elif word[:2] not in _WITH_VALUE and not (word[1:] and set(word[1:]) <= _SWITCHES):
                raise NotPreloaded(f"Python has the option {word}")
        raise NotPreloaded("the command has no script")


@dataclass(frozen=True)
class PreloaderAddress:
    """How a child's agent reaches a preloader: the name of a socket in the abstract namespace, and a secret."""

    name: str
    token: str

    @classmethod
    def of_step(cls, secret: str, environ: Mapping[str, str]) -> PreloaderAddress:
        """Return the address for the tasks of this host that know `secret`, and whose children exec would make alike.

        Each task computes it. `environ` are the environment variables of a child, except for those of its task.
        """
        affinity = sorted(os.sched_getaffinity(0))
        text = json.dumps([messages.read_conditions(), affinity, compared(environ)], sort_keys=True).encode()
        name, token = (hmac.digest(secret.encode(), use + text, "sha256").hex() for use in (b"name", b"token"))
        return cls(f"tf4slurm-{name[:16]}", token)

    def open(self) -> socket.socket:
        """Open the socket, for a preloader to be started. Raise OSError if this address has one already."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + self.name)
        except OSError:
            listener.close()
            raise
        listener.listen(_BACKLOG)
        return listener

    def to_text(self) -> str:
        return f"{self.name} {self.token}"

    @classmethod
    def from_text(cls, text: str) -> PreloaderAddress:
        return cls(*text.split(" "))


class Preloader:
    """A process that has imported what a script imports at its top, and forks processes that run the script.

    It ends with this process. Its children do not.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], *, has_own_group: bool) -> None:
        """Start the process. A thread starts it, so that a stalled file system does not delay the caller.

        Args:
            command: The command whose script the children run.
            environ: The environment variables of a child, except for those of its task.
            has_own_group: Whether the process is in a process group of its own.

        Raises:
            NotPreloaded: See `PythonCommand.parse`.
            OSError, RuntimeError: No socket can be opened, or no thread can be started.
        """
        python = PythonCommand.parse(command)
        self.address = PreloaderAddress(f"tf4slurm-{secrets.token_hex(8)}", secrets.token_hex(16))
        listener = self.address.open()
        readable, self._life = _write_settings(self.address, python, has_own_group=has_own_group)
        arguments = (python.interpreter, environ, listener, readable)
        threading.Thread(target=self._run, args=arguments, name="preloader", daemon=True).start()

    @staticmethod
    def _run(interpreter: Sequence[str], environ: Mapping[str, str], listener: socket.socket, life: int) -> None:
        """Start the process and wait for its end, both in the thread that calls this method.

        If that thread ended earlier, the kernel would kill the process. If the process cannot be started, or has ended,
        no child can connect to it.
        """
        process = None
        with contextlib.suppress(OSError):
            process = _start_program(interpreter, environ, listener, life)
        listener.close()
        os.close(life)
        if process is not None:
            process.communicate()  # waits

    def close(self) -> None:
        """Ask the process to end."""
        os.close(self._life)


def start_shared(secret: str, command: Sequence[str], environ: Mapping[str, str]) -> PreloaderAddress:
    """Start the preloader of the tasks of `PreloaderAddress.of_step`, unless one of them has. Return its address.

    It outlives this process, and ends when the last task that holds it (`Hold`) has ended.

    Raises:
        NotPreloaded: See `PythonCommand.parse`.
        OSError: No process or socket can be made.
    """
    python = PythonCommand.parse(command)
    address = PreloaderAddress.of_step(secret, environ)
    try:
        listener = address.open()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return address
    readable, writable = _write_settings(address, python, has_own_group=False, is_shared=True)
    os.close(writable)
    _start_program(python.interpreter, environ, listener, readable)
    return address


def _write_settings(address: PreloaderAddress, python: PythonCommand, **settings: bool) -> tuple[int, int]:
    """Write the settings of a preloader to a pipe. Return its file descriptors to read and write."""
    readable, writable = os.pipe()
    text = json.dumps({"token": address.token, "script": python.script, "module": python.module, **settings})
    os.write(writable, text.encode() + b"\n")
    return readable, writable


def _start_program(
    interpreter: Sequence[str], environ: Mapping[str, str], listener: socket.socket, settings: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        (*interpreter, str(_PROGRAM), str(listener.fileno()), str(settings)),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # never written; a child's output is a pipe, too
        stderr=subprocess.STDOUT,
        pass_fds=(listener.fileno(), settings),
    )


class Hold:
    """Lets a shared preloader run until this process ends."""

    def __init__(self, address: PreloaderAddress) -> None:
        """Hold the preloader at `address`. If it has ended, do nothing."""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.setblocking(False)
        with contextlib.suppress(OSError):
            self._connection.connect("\0" + address.name)
            messages.send(self._connection, {"token": address.token, "holds": True})


class ForkedProcess:
    """A process that a preloader has forked. Its parent, the keeper, is a process of tf4slurm.

    Attributes:
        process_id: Its process id.
        parent_id: The process id of the keeper.
        output: Its standard output and error.
        returncode: Its exit code, or minus the number of the signal that ended it. None while it runs.
        ended_at: Time of its end in seconds (time.monotonic). None while it runs.
        executed: Why it has executed its command instead, from the beginning, as a clause, or "".
    """

    def __init__(
        self,
        address: PreloaderAddress,
        command: Sequence[str],
        environ: Mapping[str, str],
        ignored_signals: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        """Fork the process.

        Args:
            command: Its command line.
            environ: Its environment variables.
            ignored_signals: The numbers of the signals that it ignores at its start.
            timeout_seconds: How long the preloader may take for its answer, which it sends after its imports.

        Raises:
            NotPreloaded: The preloader has ended, does not answer, or cannot make the process that exec would make.
            OSError: This process has no free file descriptor.
        """
        request = _make_request(address.token, command, environ, ignored_signals)
        self.returncode: int | None = None
        self.ended_at: float | None = None
        self.executed = ""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(timeout_seconds)
        readable, writable = os.pipe()
        self.output: IO[bytes] = open(readable, "rb", buffering=0)  # noqa: SIM115 - read until the process has ended
        try:
            self._connection.connect("\0" + address.name)
            messages.send(self._connection, request, [writable])
            self.parent_id: int = self._receive("keeper")
            self._connection.settimeout(_ANSWER_SECONDS)
            messages.send(self._connection, {"go": True})  # the process is not forked if this one has given up
            self.process_id: int = self._receive("process_id")
        except TimeoutError:
            self._give_up(f"the preloader did not answer within {timeout_seconds:g} s")
        except OSError as error:
            self._give_up(f"the preloader has ended ({error.strerror})")
        except NotPreloaded as error:
            self._give_up(str(error))
        finally:
            os.close(writable)
        self._connection.settimeout(None)

    def _give_up(self, why: str) -> None:
        self._connection.close()
        self.output.close()
        raise NotPreloaded(why)

    def _receive(self, key: str) -> Any:
        message, _ = messages.receive(self._connection)
        if message is None:
            raise NotPreloaded("the preloader has ended")
        if "refusal" in message:
            raise NotPreloaded(message["refusal"])
        return message[key]

    def wait(self) -> None:
        """Wait until the process has ended, and its process group has been killed."""
        while self.returncode is None:
            message = None
            with contextlib.suppress(OSError):
                message, _ = messages.receive(self._connection)
            if message is None:  # the kernel has killed the process, too
                self.ended_at, self.returncode = time.monotonic(), _LOST
            else:
                self.executed = message["executed"]
                self.ended_at, self.returncode = message["ended_at"], message["returncode"]

    def signal(self, number: int) -> None:
        """Send a signal to the process group. After the end of the process nothing is sent."""
        with contextlib.suppress(OSError):
            messages.send(self._connection, {"signal": int(number)})

    def kill_left_processes(self) -> None:
        """Kill what the process has left behind, and wait at most 2 s until it is gone."""
        with contextlib.suppress(OSError):
            messages.send(self._connection, {"clean": True})
            self._connection.settimeout(_CLEAN_SECONDS)
            while self._connection.recv(4096):
                pass
        self._connection.close()


def _make_request(
    token: str, command: Sequence[str], environ: Mapping[str, str], ignored_signals: Sequence[int]
) -> dict[str, object]:
    python = PythonCommand.parse(command)
    umask = os.umask(0o77)
    os.umask(umask)
    return {
        "token": token,
        "command": list(command),
        "script": python.script,
        "module": python.module,
        "arguments": python.arguments,
        "environ": dict(environ),
        "conditions": messages.read_conditions(),
        "directory": os.getcwd(),
        "umask": umask,
        "affinity": sorted(os.sched_getaffinity(0)),
        "ignored_signals": [int(number) for number in ignored_signals],
        "signal_mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }

"""Isolate a process from the network: only loopback remains."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from tf4slurm.errors import InterfaceError

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # linux/sockios.h, linux/if.h


def isolate() -> None:
    """Move this process into a network namespace of its own (Linux), where loopback is the only interface.

    For this, the process also gets a user namespace of its own, with the same user and group ids. It must have one
    thread. It needs no privilege on a system where users may create user namespaces.

    Raises:
        InterfaceError: The system is not Linux, or does not let this user create the namespaces.
    """
    if sys.platform != "linux":
        raise InterfaceError("--isolated needs Linux's network namespaces. Omit it on this system.", interface="lo")
    import ctypes  # imported here, because most processes do not need it
    import fcntl
    import struct

    uid, gid = os.geteuid(), os.getegid()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))
    except OSError as error:
        raise InterfaceError(
            f"This system does not let this user create a network namespace ({error.strerror}), which --isolated "
            "needs. Ask root to allow it (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone or "
            "kernel.apparmor_restrict_unprivileged_userns), or omit --isolated on a host that you trust.",
            interface="lo",
        ) from error

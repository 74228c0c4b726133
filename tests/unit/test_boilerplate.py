"""Which lines of a child's output are TensorFlow's start-up messages, and where they are left out."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tf4slurm.agent.child_log import ChildLog
from tf4slurm.jobs.boilerplate import BoilerplateFilter
from tf4slurm.system.output import LineWriter

# Real lines: of TensorFlow 2.21, and of the issues that boilerplate.py names.
ONEDNN = (
    "I0000 00:00:1795414407.579208    3272 port.cc:153] oneDNN custom operations are on. You may see slightly "
    "different "
    "numerical results due to floating-point round-off errors from different computation orders. To turn them off, set "
    "the environment variable `TF_ENABLE_ONEDNN_OPTS=0`."
)
BOILERPLATE = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    ONEDNN,
    "2025-03-10 15:55:25.474408: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on. You may see",
    "E0000 00:00:1795900611.730005   28309 util.cc:131] oneDNN supports DT_BOOL only on platforms with AVX-512. "
    "Falling back to the default Eigen-based implementation if present.",
    "I0000 00:00:1795415099.789879   32088 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to "
    "use available "
    "CPU instructions in performance-critical operations.",
    "To enable the following instructions: AVX2 AVX512F AVX512_VNNI AVX512_BF16 AVX_VNNI FMA, in other operations, "
    "rebuild TensorFlow with the appropriate compiler flags.",
    "I0000 00:00:1795415142.129385   32088 grpc_server_lib.cc:467] Started server with target: grpc://127.0.0.1:40833",
    "I0000 00:00:1795415143.105527    3287 master.cc:243] Scanning workers for devices: 3 total workers",
    "I0000 00:00:1795415143.778084    3287 mlir_graph_optimization_pass.cc:437] MLIR V1 optimization pass is "
    "not enabled",
    "I0000 00:00:1795415143.802623    3324 coordination_service.cc:221] Initializing CoordinationService",
    "I0000 00:00:1795421742.621824   31067 eager_service_impl.cc:349] Creating sync eager service context with "
    "rendezvous_id on host n1 /job:worker/replica:0/task:0",
    "I0000 00:00:1795421743.480925   31067 kernel_and_device.cc:101] Ignoring error status when releasing multi-device "
    "function handle UNIMPLEMENTED: Releasing a multi-device component handle on a remote device",
    "W0000 00:00:1795415144.135030    3595 local_rendezvous.cc:412] Local rendezvous is aborting with status: ABORTED: "
    "Cleanup 129697227492543468 [type.googleapis.com/tensorflow.DerivedStatus='']",
    "2026-03-09 23:56:53.249775: I tensorflow/tsl/distributed_runtime/coordination/coordination_service.cc:535] "
    "/job:worker/replica:0/task:0 has connected to coordination service. Incarnation: 13412633186268644260",
    "2026-03-09 23:56:53.250089: I tensorflow/tsl/distributed_runtime/coordination/coordination_service_agent.cc:298] "
    "Coordination agent has successfully connected.",
    "2025-10-27 08:15:24.878913: I external/local_tsl/tsl/cuda/cudart_stub.cc:31] Could not find cuda drivers on your "
    "machine, GPU will not be used.",
    "2025-11-30 03:28:13.546923: W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: "
    "Could not find "
    "TensorRT",
    "E0000 00:00:1741640125.496393    4606 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register "
    "factory for plugin cuDNN when one has already been registered",
    "2025-01-06 12:46:04.065693: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] Unable to "
    "register cuFFT "
    "factory: Attempting to register factory for plugin cuFFT",
    "W0000 00:00:1744015772.637017 3982776 computation_placer.cc:177] computation placer already registered. "
    "Please check",
)
OUTPUT = (
    "",
    "step 3 loss 0.5",
    "oneDNN custom operations are on. You may see slightly different numerical results",
    f"I read: {ONEDNN}",
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR, said TensorFlow",
    "To enable the following instructions: press a key",
    "I0000 00:00:1795414407.579208    3272 train.cc:153] oneDNN custom operations are on",
    "I1123 06:11:47.000000    3272 train.py:20] This TensorFlow binary is optimized for me",
    "2025-03-10 15:55:25.474408: E tensorflow/core/util/port.cc:153] out of memory",
    "W0000 00:00:1795415144.135030    3595 local_rendezvous.cc:412] Local rendezvous is aborting with status: "
    "UNAVAILABLE",
    "E0000 00:00:1738697930.202924    7665 cuda_dnn.cc:522] Loaded runtime CuDNN library: 9.1.0 but source "
    "was compiled "
    "with: 9.3.0.",
    "2024-01-01 00:00:00.000000: E external/local_xla/xla/stream_executor/cuda/cuda_driver.cc:282] failed "
    "call to cuInit",
)


@pytest.mark.parametrize("line", BOILERPLATE)
def test_startup_message_is_recognized(line: str) -> None:
    assert BoilerplateFilter().is_boilerplate(line)


def test_message_of_several_lines_is_recognized_to_its_end() -> None:
    message = (
        "I0000 00:00:1795421742.621918   31067 eager_service_impl.cc:355] SessionOptions: goo.gle/debugproto  ",
        "device_count {",
        '  key: "CPU"',
        "  value: 1",
        "}",
        "allow_soft_placement: true",
        "",
    )
    boilerplate = BoilerplateFilter()
    assert all(boilerplate.is_boilerplate(line) for line in message)
    assert not any(boilerplate.is_boilerplate(line) for line in message[1:])
    assert boilerplate.is_boilerplate(message[0])
    assert not any(boilerplate.is_boilerplate(line) for line in ("epoch 1", "value: 1"))


@pytest.mark.parametrize("line", OUTPUT)
def test_other_line_is_kept(line: str) -> None:
    assert not BoilerplateFilter().is_boilerplate(line)


@pytest.mark.parametrize("all_output", [False, True])
def test_startup_messages_are_in_the_log_but_not_in_the_last_lines(tmp_path: Path, all_output: bool) -> None:
    terminal = io.StringIO()
    writer = LineWriter(terminal)
    log = ChildLog(tmp_path / "chief-0.1.log", "chief/0", writer, all_output=all_output)
    text = "\n".join((*BOILERPLATE, "ValueError: no")) + "\n"
    log.write(text.encode())
    log.write(b"")
    assert log.close() == ("ValueError: no",)
    writer.close()
    shown = (*BOILERPLATE, "ValueError: no") if all_output else ("ValueError: no",)
    assert terminal.getvalue() == "".join(f"chief/0 | {line}\n" for line in shown)
    assert (tmp_path / "chief-0.1.log").read_text() == text

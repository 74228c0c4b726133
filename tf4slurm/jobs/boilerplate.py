"""Recognize messages that TensorFlow prints at every start, and that need no action.

The log files contain these messages. The terminal, `tf4slurm logs` and the last lines of a failed task omit them.
A message is recognized by TensorFlow's log format and source file, or by its whole text. So lines of a script are kept.
"""

from __future__ import annotations

import re

# Lines start with "2025-03-10 15:55:25.474408: I tensorflow/core/util/port.cc:153] ". Since TensorFlow 2.17 some start
# with "I0000 00:00:1795414407.579208    3272 port.cc:153] ".
_PREFIX = r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] (?:[\w.-]+/)+|[IWE]\d{4} \d\d:\d\d:[\d.]+ +\d+ )"
# Messages for which no source is named were printed by TensorFlow 2.21.
_MESSAGES = (
    r"port\.cc:\d+\] oneDNN custom operations are on",
    r"util\.cc:\d+\] oneDNN supports DT_\w+ only on platforms with AVX-512\. Falling back to the default ",
    r"cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized ",
    r"grpc_server_lib\.cc:\d+\] Started server with target: ",
    r"master\.cc:\d+\] Scanning workers for devices: ",
    r"mlir_graph_optimization_pass\.cc:\d+\] MLIR V1 optimization pass is not enabled",
    r"coordination_service\.cc:\d+\] Initializing CoordinationService",
    r"eager_service_impl\.cc:\d+\] Creating (?:a)?sync eager service context ",
    r"kernel_and_device\.cc:\d+\] Ignoring error status when releasing multi-device function handle ",
    r"local_rendezvous\.cc:\d+\] Local rendezvous is aborting with status: ABORTED: Cleanup ",
    # Source: TensorFlow's coordination_service.cc and coordination_service_agent.cc (LOG(INFO)).
    r"coordination_service\.cc:\d+\] /job:\S+ has connected to coordination service\. ",
    r"coordination_service_agent\.cc:\d+\] Coordination agent has successfully connected\.",
    # Source: https://github.com/tensorflow/tensorflow/issues/88676 and /issues/90790; all GPUs work in spite of them.
    r"cuda_(?:dnn|fft|blas)\.cc:\d+\] Unable to register cu\w+ factory: ",
    r"computation_placer\.cc:\d+\] computation placer already registered\.",
    # Source: https://github.com/Steinbeck-Lab/cheminformatics-microservice/issues/669
    r"cudart_stub\.cc:\d+\] Could not find cuda drivers on your machine, GPU will not be used\.",
    r"py_utils\.cc:\d+\] TF-TRT Warning: Could not find TensorRT",
    # Source: https://github.com/kr-colab/ReLERNN/issues/63
    r"cuda_(?:gpu_)?executor\.cc:\d+\] successful NUMA node read from SysFS had negative value ",
)
_LINE = re.compile(
    rf"{_PREFIX}(?:{'|'.join(_MESSAGES)})"
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    # The second line of cpu_feature_guard.cc's message.
    r"|To enable the following instructions: [A-Z0-9_ .]+, in other operations, rebuild TensorFlow with the "
    r"appropriate compiler flags\.$"
)


# This message has several lines: the first, then the fields of a protocol buffer until an empty line.
_OPTIONS = re.compile(rf"{_PREFIX}eager_service_impl\.cc:\d+\] SessionOptions: ")
_FIELD = re.compile(r" *(?:\w+ \{|\w+: .+|\})?$")


class BoilerplateFilter:
    """Recognizes start-up messages of TensorFlow in the output of one process.

    Call `is_boilerplate` with every line in order, because one of the messages has several lines.
    """

    def __init__(self) -> None:
        self._is_in_options = False

    def is_boilerplate(self, line: str) -> bool:
        if _OPTIONS.match(line):
            self._is_in_options = True
            return True
        if self._is_in_options and _FIELD.match(line):
            self._is_in_options = bool(line)
            return True
        self._is_in_options = False
        return _LINE.match(line) is not None

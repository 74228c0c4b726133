"""Tasks reach each other directly: gRPC would take its way through an HTTP proxy where the environment names one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


def past_proxies(environ: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Return what an environment needs so that these hosts are reached past its proxies; nothing if it has none."""
    if not any(environ.get(name) or environ.get(name.upper()) for name in _PROXIES):
        return {}
    names = list(dict.fromkeys(hosts))
    # gRPC reads no_grpc_proxy in place of no_proxy, where it is set.
    variables = ("no_proxy", "NO_PROXY", *(("no_grpc_proxy",) if environ.get("no_grpc_proxy") else ()))
    return {variable: ",".join(filter(None, (environ.get(variable), *names))) for variable in variables}

"""Hold a tap device of the hardware type InfiniBand, up while stdin is open.

    python tap.py NAME ADDRESS/PREFIX

A stand-in for InfiniBand, which this machine lacks: it has the same value in /sys/class/net/*/type.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys

_TUNSETIFF, _TUNSETLINK = 0x400454CA, 0x400454CD  # linux/if_tun.h
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_ARPHRD_INFINIBAND = 32

name, address = sys.argv[1:]
tun = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
fcntl.ioctl(tun, _TUNSETLINK, _ARPHRD_INFINIBAND)
subprocess.run(["ip", "addr", "add", address, "dev", name], check=True)
subprocess.run(["ip", "link", "set", name, "up"], check=True)
print("up", flush=True)
sys.stdin.read()

"""Brings the loopback interface of this namespace up, then becomes the command it was given.

Nothing is lost on it, but where ranks outnumber cores a segment's acknowledgement is late, and the kernel
would send the segment again: after twice the usual round trip as a probe of the tail, or after 200 ms. Both
are put off, since those bytes belong to no collective.
"""

import fcntl
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
IFF_UP = 0x1
PATIENCE = {"tcp_early_retrans": 0, "tcp_rto_min_us": 10_000_000}
"""Settings of this namespace's TCP; Linux has the second one since 6.11."""


def bring_up(interface: str) -> None:
    """What `ip link set lo up` does, without iproute2."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh", interface.encode(), 0)
        flags = struct.unpack("16sh", fcntl.ioctl(handle, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(handle, SIOCSIFFLAGS, struct.pack("16sh", interface.encode(), flags | IFF_UP))


def be_patient() -> None:
    """No segment is sent again because a busy machine acknowledges it late."""
    for name, value in PATIENCE.items():
        setting = Path("/proc/sys/net/ipv4", name)
        with suppress(OSError):  # an older kernel, or settings that are read-only
            setting.write_text(str(value))


if __name__ == "__main__":
    bring_up("lo")
    be_patient()
    os.execvp(sys.argv[1], sys.argv[1:])

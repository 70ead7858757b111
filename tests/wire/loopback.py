"""Brings the loopback interface of this namespace up, then becomes the command it was given."""

import fcntl
import os
import socket
import struct
import sys

SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
IFF_UP = 0x1


def bring_up(interface: str) -> None:
    """What `ip link set lo up` does, without iproute2."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh", interface.encode(), 0)
        flags = struct.unpack("16sh", fcntl.ioctl(handle, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(handle, SIOCSIFFLAGS, struct.pack("16sh", interface.encode(), flags | IFF_UP))


if __name__ == "__main__":
    bring_up("lo")
    os.execvp(sys.argv[1], sys.argv[1:])

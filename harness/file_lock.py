"""Locks of files, which the kernel releases when their owner dies, however it dies."""

from __future__ import annotations

import errno

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""What file systems without locks say."""

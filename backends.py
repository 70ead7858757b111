"""The former import path, installed for third parties; use `harness.backends`."""

from harness.old_import_path import redirect

redirect()

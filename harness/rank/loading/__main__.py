"""`python -m harness.rank.loading`: builds a job's whole model and writes its weights; see `files.py`."""

import json
import sys

from harness.rank.loading.weight_files import write_whole_model

if __name__ == "__main__":
    write_whole_model(json.load(sys.stdin))

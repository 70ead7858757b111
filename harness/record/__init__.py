"""The record of one run, schema version 2: everything shown to a person is computed from records.

Integers are bytes, floats seconds, values per rank and not aggregated, unless a field says otherwise.
"""

from harness.record.measured import *
from harness.record.run import *

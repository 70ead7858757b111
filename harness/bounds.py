"""The largest sizes that are read and planned; larger ones are refused. Imports nothing of the harness."""

LARGEST_NUMBER = 2**63 - 1
MOST_VALUES = 20_000
"""Of a document that a person writes, with everything that aliases repeat."""
MOST_DEPTH = 64
"""Of lists and mappings within each other."""
MOST_CONFIGURATION_BYTES = 2**17
"""Of a file that a person writes: YAML of that size takes seconds to read."""
MOST_DOCUMENT_BYTES = 2**26
"""Of a file that the harness writes next to records: calibrations, matrices of jobs, parts of a run."""
MOST_REPORT_BYTES = 2**28
MOST_RECORD_BYTES = 2**30
MOST_SPARSE_BYTES = 2**28
"""Of a file of data of which less than a hundredth is on the disk: reading it yields zeros for hours."""
MOST_TRACE_BYTES = 8 * 10**9
"""Of a trace, unpacked."""
MOST_EVENT_BYTES = 2**26
"""Of one event of a trace."""
MOST_SNAPSHOT_BYTES = 2**31
MOST_MESSAGE_CHARACTERS = 3000
"""Of an error."""
MOST_REPEATS = 1000
MOST_CELLS = 50_000
"""Of one comparison."""
MOST_RANKS = 2**20
"""More than any machine has; what is evaluated for every rank must end."""

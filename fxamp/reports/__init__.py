"""Reports: records, listings and dumps of graphs, warnings, which graphs ran, and why others did not."""

from fxamp.reports.record import GraphRecord, PassRecord

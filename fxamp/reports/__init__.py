"""Reports: records, listings and dumps of graphs; warnings; the graphs that ran, and the reasons why others did not."""

from fxamp.reports.record import GraphRecord, PassRecord

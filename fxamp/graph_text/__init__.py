"""Graphs as plain values and as text: nodes, decisions, casts. Imports no torch."""

from fxamp.graph_text.model import Document, Entry, KeptValue, Listing, RuleRef, Source, TensorType

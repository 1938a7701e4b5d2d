"""Graphs as plain values and as text: nodes, decisions, casts. Imports no torch."""

from fxamp.listing.model import Document, Entry, KeptValue, Listing, RuleRef, Source, TensorType

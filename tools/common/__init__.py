"""Shared by the tools: command lines, tables and charts, text formatting, output files, facts about the machine."""

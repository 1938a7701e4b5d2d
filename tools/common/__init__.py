"""What the tools share: command lines, tables and charts, words, output files, and facts about the machine."""

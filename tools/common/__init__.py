"""What the tools share: command lines, charts, and facts about the machine."""

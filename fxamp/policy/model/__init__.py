"""The parts of a policy: rules, their conditions on calls, and conditions on the machine."""

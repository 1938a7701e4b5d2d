"""The values that a policy is made of: rules, what they ask of a call, and where a policy holds."""

"""Real deliveries on a developer's machine, as they came.

Where they come from, a deployed consumer's feed for instance, is one thing; posting them to the local receiver is
another (`relay`), and so is telling a person about it (`report`).
"""

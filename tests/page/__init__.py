"""One HTML page of everything that was run: pipelines by placement, and fixes by release; needs no server.

``python -m tests.page FILE`` writes it from the committed results.
"""

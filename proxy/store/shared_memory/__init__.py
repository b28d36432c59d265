"""State that the processes of a host share in anonymous files: the buckets of rate limits, leased tokens, counts and polls.

`host_memory` lays the file out, and `robust_mutexes` guard what several processes write.
"""

"""Cluster files of small unlike clusters, for tests of commands."""

TWO_AND_TWO = """
name: test
kinds:
  quick: {peak_flops: {float32: 1.0e+9}, memory: 1 GB, memory_bandwidth: 10 GB/s, source: a test,
          platform: cpu}
  slow: {peak_flops: {float32: 5.0e+8}, memory: 1 GB, memory_bandwidth: 5 GB/s, source: a test,
         platform: cpu}
subclusters:
  - {name: quick, kind: quick, nodes: 1, devices_per_node: 2,
     intra_node: {bandwidth: 5 GB/s, latency: 20 us}}
  - {name: slow, kind: slow, nodes: 1, devices_per_node: 2,
     intra_node: {bandwidth: 5 GB/s, latency: 20 us}}
links:
  - {between: [quick, slow], bandwidth: 1 Gbit/s, latency: 0.1 ms}
"""
"""Two devices and two of half their speed.

Their kinds have figures of their own: measured ones would make another plan each time.
"""

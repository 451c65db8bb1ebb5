"""The cluster: members, the owners of keys, health, and requests between nodes.

Promise: a node that dies causes no wrong byte, and the origin is not read again for blocks that
other nodes have. Its load spreads evenly over the others. There is no leader: all nodes follow one
versioned document.

Limits: nodes may disagree for the seconds between two polls; then a request takes one more hop, or
the origin is read once more. A key whose replicas are all down is read from the origin.

    cluster_config   versioned documents in the object store, and how processes follow them
    membership       nodes, weights, drain, ramp-up
    purge            generations of keys
    hop              authenticated requests between nodes
    peers            connections to one other node, and whether it is usable
    routing          own disks, a peer, the next peer, the origin
    upstream         another cluster as the origin, and its purges
    cluster          a worker's part in the cluster

`media.partitions` computes which nodes are replicas of a key.
"""

from __future__ import annotations

from headrace.media.cluster.cluster import Cluster
from headrace.media.cluster.hop import Hop
from headrace.media.cluster.purge import Generations

__all__ = ["Cluster", "Generations", "Hop"]

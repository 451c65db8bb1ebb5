"""Several nodes as one: who is a member, who keeps what, who is alive, and one hop between them.

Promise: a node that dies costs no client a wrong byte and the origin no second read of what others have;
what its peers take over is spread evenly. Nobody decides for the others: all follow one versioned document.
Limits: nodes may disagree for the seconds between two polls; then a request takes one hop more or the
origin is asked once more. A key whose replicas are all away is read from the origin.

documents    small truths shared through the object store, changed by compare and set
polling      how the processes of a node follow them; the last good copy on disk
membership   nodes, weights, drain, ramp-up
purge        generations of keys
hop          requests between nodes, proven in both directions (pure)
health       who is asked (pure)
peers        connections to one other node
flights      one question for all who ask it at once
solo         one question of one, without a task
routing      own disks, a peer, the next peer, the origin: the heart
cluster      a worker's part in all this

`media.partitions` says which nodes are replicas of a key.
"""

from __future__ import annotations

from headrace.media.cluster.cluster import Cluster
from headrace.media.cluster.hop import Hop
from headrace.media.cluster.purge import Generations

__all__ = ["Cluster", "Generations", "Hop"]

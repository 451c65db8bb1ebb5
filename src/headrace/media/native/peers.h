/* Requests to other nodes: persistent connections to each, with one request at a time.

   The control plane chooses the peer of an object and gives the plane its address. A `fetch` requests
   the bytes of one block at most, as media/cluster/routing.py does. They are received into memory of
   their own while the client is sent what was received, so a slow client holds no connection to a peer.

   A fault before the first byte of the client's answer hands the client with its request to the
   control plane, which requests again, learns of the fault and uses the next node. A later fault hands
   over the rest of the body. So the plane does not judge the health of a peer; it only reports that one
   is slow. */
#ifndef HEADRACE_PEERS_H
#define HEADRACE_PEERS_H

#include <netinet/in.h>
#include <stdint.h>
#include <sys/socket.h>

#include "hop.h"
#include "peer_head.h"

struct plane;
struct connection;
struct peer_connection;

struct peer {
  struct peer *next;
  int32_t number;
  int32_t timeout_ms;
  int connections;
  struct peer_connection *idle, *busy; /* the last one used first */
  struct sockaddr_storage at;
  socklen_t at_bytes;
  char name[HOP_NAME_MAX + 1];
  char address[]; /* for the Host field */
};

struct peer_connection {
  int fd;
  uint8_t is_slow; /* reported for the current request */
  uint8_t is_last; /* closed after the current request */
  uint64_t number, counter; /* see hop.h */
  int64_t began_ms;
  struct peer *peer;
  struct fetch *fetch; /* NULL: idle */
  struct peer_connection *earlier, *later; /* in a list of the peer, or of the ended ones */
};

/* A request to a peer for a part of a client's answer, at most to the end of its block.

   `buffer` holds the client's head, then the request while it is sent, or the received head and body
   of the peer. The client's head is moved in front of the body, so that both are sent by one call. */
struct fetch {
  struct connection *client;
  struct peer_connection *from; /* NULL: everything was received */
  char mac[HOP_MAC + 1];        /* of the request */
  const struct hmac_key *key;   /* that signed it */
  uint8_t is_begun;             /* bytes of the client's answer were sent */
  uint8_t is_part;              /* the answer is a 206 */
  size_t request_bytes;         /* of the client's head at the start of its `in`; 0: a later block */
  size_t head_left;             /* bytes of the client's head that were not sent */
  size_t unsent;                /* of the request to the peer */
  size_t filled;                /* of the peer's head and body */
  size_t at, end;               /* the part of the buffer that may be sent to the client */
  int64_t start, bytes;         /* of the object */
  int64_t missing;              /* bytes that were not received */
  int64_t began_ns, asked_ns;   /* the client's request and the one to the peer */
  size_t buffer_bytes;
  char buffer[];
};

/* The connections of a plane to other nodes. */
struct peers {
  struct peer *first;
  struct peer_connection *ended; /* to be freed after the batch */
};

struct peer *peer_make(int32_t number, const char *name, const char *address, const char *ip, int port, int timeout_ms);
void peers_put(struct plane *plane, struct peer *peer);
void peers_drop(struct plane *plane, int32_t number);
void peers_close(struct plane *plane);
void peers_free_ended(struct plane *plane);
/* Close connections whose time is over, and report slow peers. */
void peers_expire(struct plane *plane);
/* Whether an event of epoll is of a connection to a peer, and its handling. */
int peers_has_event(const void *of_event);
void peers_handle(struct plane *plane, void *of_event);

/* Request the next bytes of the client's answer, from `connection->start` on. `head` is sent before
   them. Returns NULL if the peer is not known, or no connection can be used. */
struct fetch *fetch_start(struct plane *plane, struct connection *connection, const char *head, size_t head_bytes);
/* End a fetch of a connection. */
void fetch_end(struct plane *plane, struct connection *connection);
#endif

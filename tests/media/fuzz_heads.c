/* Mutate heads of requests, and of answers of other nodes, and read them as the native data plane does. Built with sanitizers, which
   end the program at the first fault. Each head is in memory of exactly its size.

     fuzz_heads SECONDS SEED */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "head.h"
#include "hop.h"
#include "peer_head.h"
#include "url.h"

static const char *SEEDS[] = {
    "GET /m/tracks/a.mp3?e=1795302000&k=3f2a9c10&a=203.0.113.0/24&r=65536&s=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    " HTTP/1.1\r\nHost: media.example:8081\r\nRange: bytes=262144-524287\r\nConnection: keep-alive\r\n\r\n",
    "GET /m/a HTTP/1.1\r\nHost: h\r\nIf-Match: \"abc\"\r\nRange: bytes=0-\r\nX-Headrace-Hop: "
    "1;3f2a9c10;n1;n2;1795302000000;0123456789abcdef;17;3;"
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n\r\n",
    "GET /m/a?e=1&k=3f2a9c10&a=2001:db8::/32&s= HTTP/1.1\r\nhost:h\r\nAccept: */*\r\n\r\nGET /m/b",
};

static const char ANSWER[] =
    "HTTP/1.1 206 Partial Content\r\nDate: Mon, 23 Nov 2026 11:21:19 GMT\r\nETag: \"e1-300\"\r\n"
    "Accept-Ranges: bytes\r\nContent-Length: 1000\r\nContent-Range: bytes 0-999/3145728\r\nConnection: close\r\n"
    "X-Headrace-Reply: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n\r\nbody";

static uint64_t state;

static uint64_t next_random(void) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static size_t mutate(char *data, size_t bytes, size_t bytes_max) {
  for (uint64_t count = 1 + next_random() % 6; count > 0 && bytes > 0; count--) {
    size_t at = next_random() % bytes, length = 1 + next_random() % 24;
    switch (next_random() % 5) {
      case 0: data[at] = (char)next_random(); break;
      case 1: data[at] = "\r\n:; ?&=/-0"[next_random() % 11]; break;
      case 2: bytes = at; break;
      case 3: /* repeat a part */
        if (at + length <= bytes && bytes + length <= bytes_max) {
          memmove(data + at + length, data + at, bytes - at);
          bytes += length;
        }
        break;
      default: /* remove a part */
        if (at + length <= bytes) {
          memmove(data + at, data + at + length, bytes - at - length);
          bytes -= length;
        }
    }
  }
  return bytes;
}

static void read_once(const char *data, size_t bytes, const struct url_keys *keys, const struct hop_keys *hops) {
  struct head head;
  struct url url;
  struct hop hop;
  struct address address = {.is_known = 1};
  char *exact = malloc(bytes + !bytes);
  memcpy(exact, data, bytes);
  if (head_read(exact, bytes, 1, &head) == HEAD_PLAIN) {
    if (head.bytes > bytes || head.target.at < exact || head.target.at + head.target.bytes > exact + head.bytes) abort();
    if (url_read(head.target.at, head.target.bytes, keys, 0, 1000, &url)) url_allows(&url, &address);
    if (head.hop.at != NULL) hop_read(hops, &head, &hop);
  }
  free(exact);
}

static void read_answer_once(const char *data, size_t bytes) {
  struct peer_head head;
  char *exact = malloc(bytes + !bytes);
  memcpy(exact, data, bytes);
  if (peer_head_read(exact, bytes, &head) == PEER_HEAD_PART) {
    if (head.bytes > bytes) abort();
    peer_head_is_for(&head, "e1-300", 3145728, 0, 1000, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa");
  }
  free(exact);
}

int main(int count, char **arguments) {
  if (count != 3) return 2;
  time_t end = time(NULL) + atol(arguments[1]);
  state = strtoull(arguments[2], NULL, 10) | 1;
  static struct url_keys keys = {.count = 1, .ids = {{'3', 'f', '2', 'a', '9', 'c', '1', '0'}}};
  static struct hop_keys hops = {.name = "n2"};
  hops.keys = keys;
  unsigned long long runs = 0;
  do {
    char data[4096];
    uint64_t chosen = next_random() % 4;
    const char *seed = chosen == 3 ? ANSWER : SEEDS[chosen];
    size_t bytes = strlen(seed);
    memcpy(data, seed, bytes);
    bytes = mutate(data, bytes, sizeof data);
    if (chosen == 3) read_answer_once(data, bytes);
    else read_once(data, bytes, &keys, &hops);
  } while (++runs % 1024 != 0 || time(NULL) < end);
  printf("%llu heads\n", runs);
  return 0;
}

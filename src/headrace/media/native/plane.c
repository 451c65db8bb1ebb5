/* The public functions: both queues, start and end. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "loop.h"

static void notify(int fd) {
  uint64_t one = 1;
  while (write(fd, &one, sizeof one) < 0 && errno == EINTR) continue;
}

static void clear(int fd) {
  uint64_t count;
  while (read(fd, &count, sizeof count) < 0 && errno == EINTR) continue;
}

/* Queues */

static int push_command(struct plane *plane, enum command_kind kind, int fd, int64_t number, void *data) {
  struct command *command = malloc(sizeof *command);
  if (command == NULL) return -1;
  *command = (struct command){.kind = kind, .fd = fd, .number = number, .data = data};
  pthread_mutex_lock(&plane->lock);
  int was_empty = plane->first_command == NULL;
  if (was_empty) plane->first_command = command;
  else plane->last_command->next = command;
  plane->last_command = command;
  pthread_mutex_unlock(&plane->lock);
  if (was_empty) notify(plane->commands_fd);
  return 0;
}

struct command *plane_take_commands(struct plane *plane) {
  clear(plane->commands_fd); /* before the queue, so that no command is left without a wake-up */
  pthread_mutex_lock(&plane->lock);
  struct command *first = plane->first_command;
  plane->first_command = plane->last_command = NULL;
  pthread_mutex_unlock(&plane->lock);
  return first;
}

void plane_push_event(struct plane *plane, struct queued_event *event) {
  event->next = NULL;
  pthread_mutex_lock(&plane->lock);
  int was_empty = plane->first_event == NULL;
  if (was_empty) plane->first_event = event;
  else plane->last_event->next = event;
  plane->last_event = event;
  pthread_mutex_unlock(&plane->lock);
  if (was_empty) notify(plane->events_fd);
}

void plane_report(struct plane *plane, int kind, int64_t number) {
  struct queued_event *queued = calloc(1, sizeof *queued);
  if (queued == NULL) return;
  queued->event = (struct plane_event){.kind = kind, .fd = -1, .file = -1, .start = number};
  plane_push_event(plane, queued);
}

const struct plane_event *plane_next_event(struct plane *plane) {
  pthread_mutex_lock(&plane->lock);
  struct queued_event *event = plane->first_event;
  if (event != NULL && (plane->first_event = event->next) == NULL) plane->last_event = NULL;
  pthread_mutex_unlock(&plane->lock);
  if (event == NULL) {
    clear(plane->events_fd);
    /* One may have been pushed between the look and the clear. */
    pthread_mutex_lock(&plane->lock);
    int is_missed = plane->first_event != NULL;
    pthread_mutex_unlock(&plane->lock);
    if (is_missed) notify(plane->events_fd);
    return NULL;
  }
  return &event->event;
}

void plane_event_done(const struct plane_event *event) {
  free((void *)(uintptr_t)event); /* the event is the first field of what was allocated */
}

int plane_event_fd(const struct plane *plane) { return plane->events_fd; }
const struct plane_counters *plane_counters(const struct plane *plane) { return &plane->counters; }

void plane_add_sample(struct plane *plane, const struct object *object) {
  pthread_mutex_lock(&plane->lock);
  if (plane->samples_bytes + object->key_bytes < SAMPLES_BYTES) {
    memcpy(plane->samples + plane->samples_bytes, object->key, object->key_bytes);
    plane->samples_bytes += object->key_bytes;
    plane->samples[plane->samples_bytes++] = '\n';
  }
  pthread_mutex_unlock(&plane->lock);
}

int plane_take_samples(struct plane *plane, char *into, int bytes_max) {
  pthread_mutex_lock(&plane->lock);
  size_t bytes = plane->samples_bytes < (size_t)bytes_max ? plane->samples_bytes : 0;
  memcpy(into, plane->samples, bytes);
  plane->samples_bytes = 0;
  pthread_mutex_unlock(&plane->lock);
  return (int)bytes;
}

/* Commands */

/* Push a command that owns `data`, which is freed if that fails. */
static int push_data(struct plane *plane, enum command_kind kind, void *data) {
  int result = push_command(plane, kind, -1, 0, data);
  if (result != 0) free(data);
  return result;
}

int plane_listen(struct plane *plane, int listener, int is_tls) {
  return push_command(plane, COMMAND_LISTEN, listener, is_tls, NULL);
}

int plane_stop_listening(struct plane *plane) { return push_command(plane, COMMAND_STOP_LISTENING, -1, 0, NULL); }
int plane_released(struct plane *plane) { return push_command(plane, COMMAND_RELEASED, -1, 0, NULL); }
int plane_forget_objects(struct plane *plane) { return push_command(plane, COMMAND_FORGET_OBJECTS, -1, 0, NULL); }

int plane_forget_object(struct plane *plane, const char *key) {
  char *copy = strdup(key);
  return copy != NULL ? push_data(plane, COMMAND_FORGET_OBJECT, copy) : -1;
}

int plane_adopt(struct plane *plane, int fd, struct tls *tls, int64_t sent_bytes) {
  return push_command(plane, COMMAND_ADOPT, fd, sent_bytes, tls);
}

int plane_put_object(struct plane *plane, const struct plane_object *described) {
  struct object *object = object_make(described);
  if (object == NULL) return -1;
  int result = push_command(plane, COMMAND_PUT_OBJECT, -1, 0, object);
  if (result != 0) object_release(object);
  return result;
}

static int fill_keys(struct url_keys *keys, const char *ids, const uint8_t *secrets, int count) {
  if (count < 0 || count > URL_KEYS_MAX) return -1;
  keys->count = count;
  for (int i = 0; i < count; i++) {
    memcpy(keys->ids[i], ids + i * URL_KEY_ID, URL_KEY_ID);
    hmac_key_set(&keys->keys[i], secrets + i * SHA256_BYTES, SHA256_BYTES);
  }
  return 0;
}

int plane_set_keys(struct plane *plane, const char *ids, const uint8_t *secrets, int count) {
  struct url_keys *keys = calloc(1, sizeof *keys);
  if (keys != NULL && fill_keys(keys, ids, secrets, count) == 0) return push_data(plane, COMMAND_SET_KEYS, keys);
  free(keys);
  return -1;
}

int plane_set_hop_keys(struct plane *plane, const char *name, const char *ids, const uint8_t *secrets, int count) {
  struct hop_keys *keys = calloc(1, sizeof *keys);
  if (keys != NULL && strlen(name) <= HOP_NAME_MAX && fill_keys(&keys->keys, ids, secrets, count) == 0) {
    strcpy(keys->name, name);
    return push_data(plane, COMMAND_SET_HOP_KEYS, keys);
  }
  free(keys);
  return -1;
}

int plane_put_peer(struct plane *plane, int32_t number, const char *name, const char *address, const char *ip, int port,
                   int timeout_ms) {
  struct peer *peer = peer_make(number, name, address, ip, port, timeout_ms);
  return peer != NULL ? push_data(plane, COMMAND_PUT_PEER, peer) : -1;
}

int plane_drop_peer(struct plane *plane, int32_t number) {
  return push_command(plane, COMMAND_DROP_PEER, -1, number, NULL);
}

int plane_set_certificate(struct plane *plane, const char *certificate, const char *key, char *why, int why_bytes) {
  SSL_CTX *context = tls_context_make(certificate, key, plane->tls->seed, why, (size_t)why_bytes);
  if (context == NULL) return -1;
  int result = push_command(plane, COMMAND_SET_CERTIFICATE, -1, 0, context);
  if (result != 0) tls_context_free(context);
  return result;
}

int plane_hop_advance(struct plane *plane, uint64_t connection, uint64_t counter) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return hop_advance(&plane->hop_counters, connection, counter, now.tv_sec * 1000ll + now.tv_nsec / 1000000);
}

int plane_set_disks(struct plane *plane, uint64_t revision, const struct plane_disk *disks, int count,
                    const uint8_t *owners, const uint8_t *owners_before, const uint8_t *hash_key,
                    int hash_key_bytes) {
  struct blocks *blocks = blocks_make(revision, disks, count, owners, owners_before, hash_key, (size_t)hash_key_bytes);
  if (blocks == NULL) return -1;
  int result = push_command(plane, COMMAND_SET_BLOCKS, -1, 0, blocks);
  if (result != 0) free(blocks);
  return result;
}

/* Start and end */

static void free_plane(struct plane *plane) {
  for (struct command *command = plane->first_command, *next; command != NULL; command = next) {
    next = command->next;
    if (command->kind == COMMAND_PUT_OBJECT) object_release(command->data);
    else if (command->kind == COMMAND_ADOPT) tls_free(command->data);
    else if (command->kind == COMMAND_SET_CERTIFICATE) tls_context_free(command->data);
    else free(command->data);
    if (command->fd >= 0) close(command->fd);
    free(command);
  }
  for (struct queued_event *event = plane->first_event, *next; event != NULL; event = next) {
    next = event->next;
    tls_free(event->event.tls);
    log_entry_free(event->event.entry);
    if (event->event.fd >= 0) close(event->event.fd);
    if (event->event.file >= 0) close(event->event.file);
    free(event);
  }
  for (int i = 0; i < plane->listeners_count; i++) close(plane->listeners[i].fd);
  peers_close(plane);
  files_close_unused(&plane->files, INT64_MAX);
  objects_clear(&plane->objects);
  free(plane->blocks);
  free(plane->folder);
  free(plane->keys);
  free(plane->hop_keys);
  if (plane->tls != NULL) tls_context_free(plane->tls->context);
  free(plane->tls);
  if (plane->epoll >= 0) close(plane->epoll);
  if (plane->commands_fd >= 0) close(plane->commands_fd);
  if (plane->events_fd >= 0) close(plane->events_fd);
  pthread_mutex_destroy(&plane->lock);
  pthread_mutex_destroy(&plane->hop_counters.lock);
  free(plane);
}

struct plane *plane_start(const struct plane_config *config) {
  struct plane *plane = calloc(1, sizeof *plane);
  if (plane == NULL) return NULL;
  plane->config = *config;
  plane->config.folder = plane->folder = config->folder != NULL ? strdup(config->folder) : NULL;
  pthread_mutex_init(&plane->lock, NULL);
  pthread_mutex_init(&plane->hop_counters.lock, NULL);
  plane->epoll = epoll_create1(EPOLL_CLOEXEC);
  plane->commands_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  plane->events_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  plane->deadlines[DEADLINE_HEADER].timeout_ms = config->header_timeout_ms;
  plane->deadlines[DEADLINE_IDLE].timeout_ms = config->idle_timeout_ms;
  plane->deadlines[DEADLINE_SEND].timeout_ms = config->send_timeout_ms;
  loop_refresh_time(plane);
  plane->random = (uint32_t)plane->now_ms | 1;
  plane->sample_left = 1;
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = &plane->commands_fd};
  /* Signals are the control plane's. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int is_started = plane->epoll >= 0 && plane->commands_fd >= 0 && plane->events_fd >= 0 &&
                   (config->ticket_seed == NULL || (plane->tls = tls_server_make(config->ticket_seed)) != NULL) &&
                   epoll_ctl(plane->epoll, EPOLL_CTL_ADD, plane->commands_fd, &event) == 0 &&
                   pthread_create(&plane->thread, NULL, loop_run, plane) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (is_started) return plane;
  free_plane(plane);
  return NULL;
}

void plane_close(struct plane *plane) {
  if (push_command(plane, COMMAND_CLOSE, -1, 0, NULL) != 0) return;
  pthread_join(plane->thread, NULL);
  free_plane(plane);
}

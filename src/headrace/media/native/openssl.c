#include "openssl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static struct openssl functions;
static const char *missing = "OpenSSL was not looked for";
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *open_library(const char *name) {
  void *loaded = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  return loaded != NULL ? loaded : dlopen(name, RTLD_NOW | RTLD_LOCAL);
}

static int find(void *library, const char *name, void *function) {
  void *found = dlsym(library, name);
  memcpy(function, &found, sizeof found);
  return found != NULL;
}

/* A Python with OpenSSL inside its program would lend its functions to libssl: two versions in one. */
static int is_mixed(void *crypto) {
  void *global = dlsym(RTLD_DEFAULT, "OpenSSL_version_num");
  return global != NULL && global != dlsym(crypto, "OpenSSL_version_num");
}

static void load(void) {
  void *crypto = open_library("libcrypto.so.3"), *ssl = crypto != NULL ? open_library("libssl.so.3") : NULL;
  if (ssl == NULL) {
    missing = "libssl.so.3 or libcrypto.so.3 (OpenSSL 3) is not installed";
    return;
  }
  if (is_mixed(crypto)) {
    missing = "this Python contains another OpenSSL than libssl.so.3";
    return;
  }
  int is_complete = 1;
#define FIND_SSL(result, name, arguments) is_complete &= find(ssl, #name, &functions.name);
#define FIND_CRYPTO(result, name, arguments) is_complete &= find(crypto, #name, &functions.name);
  OPENSSL_SSL(FIND_SSL)
  OPENSSL_CRYPTO(FIND_CRYPTO)
  missing = is_complete ? NULL : "libssl.so.3 lacks functions of OpenSSL 3";
}

const struct openssl *openssl_load(const char **why) {
  pthread_once(&once, load);
  *why = missing;
  return missing == NULL ? &functions : NULL;
}

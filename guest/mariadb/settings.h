// SPDX-License-Identifier: GPL-2.0-only
/* System variables; plugin.cc defines and describes them. */
#ifndef MILLRACE_SETTINGS_H
#define MILLRACE_SETTINGS_H

#include "client.h"
#include "server.h"

#include <string>

namespace millrace {

extern handlerton *hton;

Endpoint get_host_endpoint();
uint32_t reconnect_ms();
size_t pool_size();
bool is_durable(THD *thd);
bool is_strict(THD *thd);
bool buffers_writes(THD *thd);
bool buffers_transaction(THD *thd);
bool pushes_conditions(THD *thd);
uint32_t lock_wait_ms(THD *thd);
size_t batch_bytes(THD *thd);
uint64_t autoinc_batch(THD *thd);

} // namespace millrace

#endif

// SPDX-License-Identifier: GPL-2.0-only
/* Status of the engine: SHOW STATUS and SHOW ENGINE MILLRACE STATUS. */
#ifndef MILLRACE_STATUS_H
#define MILLRACE_STATUS_H

#include "server.h"

#include <string>

#include "session.h"

namespace millrace {

extern SHOW_VAR status_variables[];

/* Text about the connection, the host's store as this session reaches it, and the counters. */
std::string status_text(Session *session);

} // namespace millrace

#endif

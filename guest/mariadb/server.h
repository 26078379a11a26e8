// SPDX-License-Identifier: GPL-2.0-only
/* MariaDB's private headers, in the only order that compiles. */
#ifndef MILLRACE_SERVER_H
#define MILLRACE_SERVER_H

#define MYSQL_SERVER 1
#include <my_global.h>

#include "sql_class.h"

#include "field.h"
#include "key.h"
#include "sql_table.h"
#include "table.h"

#endif

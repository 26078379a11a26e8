// SPDX-License-Identifier: GPL-2.0-only
/* What the tests without a server have in common. */
#pragma once
#include <cstdio>

namespace {

int passed, failed;

void check(bool is_good, const char *what)
{
    is_good ? passed++ : failed++;
    if (!is_good)
        printf("failed: %s\n", what);
}

/* The last line, and how the program ends. */
int report()
{
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

} // namespace

// SPDX-License-Identifier: GPL-2.0-only
/* Pool of clients with a connection and no transaction, for new sessions. */
#include <mutex>
#include <vector>

#include "client.h"

namespace millrace {

static std::mutex pool_lock;
static std::vector<Client *> pool;

Client *take_client(const Endpoint &endpoint, uint32_t patience_ms)
{
    std::lock_guard<std::mutex> guard(pool_lock);
    while (!pool.empty()) {
        Client *client = pool.back();
        pool.pop_back();
        if (client->address() == endpoint.address && client->ring() == endpoint.ring) {
            client->set_patience_ms(patience_ms);
            client->set_spin_us(endpoint.spin_us);
            return client;
        }
        delete client;
    }
    return new Client(endpoint, "table", patience_ms);
}

void return_client(Client *client, size_t max_clients)
{
    {
        std::lock_guard<std::mutex> guard(pool_lock);
        if (client->is_idle() && pool.size() < max_clients) {
            pool.push_back(client);
            return;
        }
    }
    delete client;
}

size_t count_pool()
{
    std::lock_guard<std::mutex> guard(pool_lock);
    return pool.size();
}

void drop_pool()
{
    std::lock_guard<std::mutex> guard(pool_lock);
    for (Client *client : pool)
        delete client;
    pool.clear();
}

} // namespace millrace

//! Tests of the engine on one thread, with a model driver.

#[allow(non_snake_case)]
mod abuse;
mod allocations;
mod at_once;
#[allow(non_snake_case)]
mod claims;
mod credits;
#[allow(non_snake_case)]
mod detach;
mod durability;
#[allow(non_snake_case)]
mod files;
#[allow(non_snake_case)]
mod flushes;
#[allow(non_snake_case)]
mod holding;
#[allow(non_snake_case)]
mod in_place;
mod latency;
#[allow(non_snake_case)]
mod locks;
#[allow(non_snake_case)]
mod long_chains;
mod memory_disks;
#[allow(non_snake_case)]
mod migration;
mod placeholder_bytes;
#[allow(non_snake_case)]
mod placeholder_port;
#[allow(non_snake_case)]
mod placeholder_reads;
#[allow(non_snake_case)]
mod placeholders;
#[allow(non_snake_case)]
mod port;
#[allow(non_snake_case)]
mod registered_memory;
mod requests;
mod steps;
mod turns;

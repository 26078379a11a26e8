//! Random 4 KiB reads through a port on one sidecore: `disk_bench raw:PATH|memory|null [depth]`.
//! For the developer's eye; comparisons with peers are made by the bench crate.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::clock::MonotonicClock;
use base::random::{Random, Seeded};
use block::{BackendConfig, BlockPort, BlockPortConfig};
use queue::Layout;
use queue::testing::{ModelDriver, ModelOptions};
use sidecore::{Sidecore, SidecoreConfig};
use vhost_user::Device;

const LEN_BYTES: u64 = 256 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let kind = args.get(1).map_or("null", String::as_str);
    let depth: u64 = args.get(2).map_or(Ok(1), |d| d.parse())?;
    let backend = match kind.split_once(':') {
        Some(("raw", path)) => {
            BackendConfig::Raw { path: path.into(), direct: false, registered_memory_bytes: 0 }
        }
        Some(("direct", path)) => {
            BackendConfig::Raw { path: path.into(), direct: true, registered_memory_bytes: 0 }
        }
        Some(("qcow2", path)) => BackendConfig::Qcow2 {
            path: path.into(),
            backing_dir: None,
            data_file: None,
            cache_len_bytes: 0,
            direct: false,
        },
        _ if kind == "memory" => BackendConfig::Memory { len_bytes: LEN_BYTES },
        _ => BackendConfig::Null { len_bytes: LEN_BYTES },
    };
    for layout in [Layout::Split, Layout::Packed] {
        let clock = Arc::new(MonotonicClock);
        let config = SidecoreConfig { cpu: Some(0), spin_us: 1000, ..SidecoreConfig::default() };
        let core = Sidecore::spawn(config, clock.clone())?;
        let mut config = BlockPortConfig::new("bench/disk", backend.clone());
        config.block_size = 4096;
        let port = BlockPort::new(config, std::slice::from_ref(&core), clock)?;
        base::cpu::pin_current_thread(1)?;
        let options = ModelOptions { event_idx: true, ..ModelOptions::default() };
        let mut driver = ModelDriver::with_options(layout, 256, options);
        driver.set_interrupts(false);
        port.start_queue(driver.vring(0))?;
        let iops = run(&mut driver, depth, port.len_bytes() / 4096);
        println!("{kind} {layout:?} depth {depth}: {:.0} k IOPS", iops / 1000.0);
        port.reset();
        core.shutdown();
    }
    Ok(())
}

/// Keeps `depth` reads in flight for two seconds.
fn run(driver: &mut ModelDriver, depth: u64, blocks: u64) -> f64 {
    let mut random = Seeded::new(1);
    let buffers: Vec<[(u64, u32); 3]> = (0..depth)
        .map(|_| [driver.buffer(&[0; 16]), driver.buffer(&[0; 4096]), driver.buffer(&[1])])
        .collect();
    let mut slot_of = vec![0usize; 65536];
    let mut offer = |driver: &mut ModelDriver, slot: usize, slot_of: &mut [usize]| {
        let [header, data, status] = buffers[slot];
        let block = u64::from(random.below(blocks as u32));
        driver.write(header.0 + 8, &(block * 8).to_le_bytes());
        let id = driver.offer(&[header], &[data, status]);
        slot_of[usize::from(id)] = slot;
        driver.kick();
    };
    for slot in 0..depth as usize {
        offer(driver, slot, &mut slot_of);
    }
    let (start, mut count) = (Instant::now(), 0u64);
    loop {
        while let Some((id, _)) = driver.used() {
            count += 1;
            offer(driver, slot_of[usize::from(id)], &mut slot_of);
        }
        if count & 0xff == 0 && start.elapsed() > Duration::from_secs(2) {
            return count as f64 / start.elapsed().as_secs_f64();
        }
    }
}

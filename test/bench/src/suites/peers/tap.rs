//! The load of the TAP and bridge reference: a program of its own within this one (`bench tap`), so
//! that its CPU time can be told from ours. It prints what a front end prints.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::reading::Reading;
use crate::harness::usage;

/// Bytes of the virtio-net header before each frame.
const HEADER: usize = 12;
const ETH: usize = 14;
/// Ethernet, IPv4 and TCP headers.
const HEADERS: usize = ETH + 20 + 20;
/// Payload of the segments that a super-packet stands for.
const SEGMENT_BYTES: u16 = 1448;
/// Largest frame that a device accepts without offload.
const PLAIN_BYTES: usize = 1514;
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0xa], [2, 0, 0, 0, 0, 0xb]];
/// Round trips remembered: more than a slow kernel does in the longest load.
const MAX_SAMPLES: usize = 1 << 24;
/// Loss ends a round trip's wait.
const LOST: Duration = Duration::from_millis(100);
/// Time for a bridge to forward: the kernel tells it of new links once a second.
const FORWARDS: Duration = Duration::from_secs(5);

/// Setup of a load on TAP devices.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Names of the two devices.
    pub taps: [String; 2],
    /// Bytes of a frame, its Ethernet header included.
    pub frame_bytes: usize,
    /// CPUs: of the round trips and of the flood's receiver, and of the flood's sender.
    pub cpus: [usize; 2],
    /// Before it counts.
    pub warm_up: Duration,
    /// While it counts.
    pub length: Duration,
}

/// Floods: as many frames as go from the first device to the second, a thread at each end.
pub fn flood(setup: &Setup) -> io::Result<Reading> {
    let (mut a, mut b) = open_both(setup)?;
    let frame = frame(setup.frame_bytes, MACS[0], MACS[1]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| -> io::Result<()> {
            base::cpu::pin_current_thread(setup.cpus[1])?;
            while !stop.load(Ordering::Relaxed) {
                a.write_all(&frame)?;
            }
            Ok(())
        });
        let received = receive(setup, &mut b, frame.len());
        stop.store(true, Ordering::Relaxed);
        let sent = sender.join().map_err(|_| io::Error::other("the sender panicked"))?;
        sent.and(received)
    })
}

fn receive(setup: &Setup, b: &mut File, len: usize) -> io::Result<Reading> {
    base::cpu::pin_current_thread(setup.cpus[0])?;
    let mut buffer = vec![0; HEADER + (1 << 16)];
    let from = Instant::now() + setup.warm_up;
    let (mut started, mut count) = (None, 0u64);
    loop {
        let n = read_now(b, &mut buffer)?.unwrap_or(0);
        let now = Instant::now();
        let Some((begin, meter)) = &started else {
            if now >= from {
                started = Some((now, Meter::start()));
            }
            continue;
        };
        count += u64::from(n == len);
        let seconds = now.duration_since(*begin).as_secs_f64();
        if seconds >= setup.length.as_secs_f64() {
            return Ok(meter.add(reading(count, seconds, setup.frame_bytes as f64)));
        }
    }
}

/// One frame there and back, over and over, from one thread: the kernel carries a frame over the
/// bridge within the write.
pub fn round_trips(setup: &Setup) -> io::Result<Reading> {
    let (mut a, mut b) = open_both(setup)?;
    let there = frame(setup.frame_bytes, MACS[0], MACS[1]);
    let back = frame(setup.frame_bytes, MACS[1], MACS[0]);
    base::cpu::pin_current_thread(setup.cpus[0])?;
    let mut buffer = vec![0; HEADER + (1 << 16)];
    let mut took_ns: Vec<u32> = Vec::new();
    let begin = Instant::now();
    let mut last = begin;
    let mut meter = None;
    while last.duration_since(begin) < setup.warm_up + setup.length && took_ns.len() < MAX_SAMPLES {
        a.write_all(&there)?;
        await_frame(&mut b, &mut buffer, &there)?;
        b.write_all(&back)?;
        await_frame(&mut a, &mut buffer, &back)?;
        let now = Instant::now();
        if last.duration_since(begin) >= setup.warm_up {
            meter.get_or_insert_with(Meter::start);
            took_ns.push(now.duration_since(last).as_nanos().min(u128::from(u32::MAX)) as u32);
        }
        last = now;
    }
    let seconds = took_ns.iter().map(|ns| f64::from(*ns)).sum::<f64>() / 1e9;
    let r = reading(took_ns.len() as u64, seconds, setup.frame_bytes as f64);
    let r = meter.map_or(r, |m| m.add(r));
    took_ns.sort_unstable();
    let at = |percent: usize| took_ns.get(took_ns.len() * percent / 100).map(|ns| f64::from(*ns));
    Ok(Reading { p50_ns: at(50), p99_ns: at(99), ..r })
}

fn reading(count: u64, seconds: f64, frame_bytes: f64) -> Reading {
    let (ops, seconds) = (count as f64, seconds.max(1e-9));
    let ops_per_s = ops / seconds;
    Reading { ops, seconds, ops_per_s, bytes_per_s: ops_per_s * frame_bytes, ..Reading::default() }
}

/// Reads until the frame is there; others, such as the kernel's own, are not ours.
fn await_frame(tap: &mut File, buffer: &mut [u8], want: &[u8]) -> io::Result<()> {
    let since = Instant::now();
    loop {
        match read_now(tap, buffer)? {
            Some(n) if buffer.get(HEADER..n) == Some(&want[HEADER..]) => return Ok(()),
            None if since.elapsed() > LOST => return Err(ErrorKind::TimedOut.into()),
            _ => {}
        }
    }
}

fn read_now(tap: &mut File, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match tap.read(buffer) {
        Ok(n) => Ok(Some(n)),
        Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(e),
    }
}

/// A TCP frame behind its virtio-net header; above what a device takes plain it is a super-packet.
fn frame(len: usize, from: [u8; 6], to: [u8; 6]) -> Vec<u8> {
    let mut f = vec![0; HEADER + len.max(HEADERS)];
    if len > PLAIN_BYTES {
        // NEEDS_CSUM, GSO_TCPV4, header length, segment length, checksum start and offset.
        f[..2].copy_from_slice(&[1, 1]);
        for (at, value) in [(2, HEADERS as u16), (4, SEGMENT_BYTES), (6, 34), (8, 16)] {
            f[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
    }
    let eth = &mut f[HEADER..];
    eth[..6].copy_from_slice(&to);
    eth[6..12].copy_from_slice(&from);
    eth[12..14].copy_from_slice(&[8, 0]);
    // IPv4 and TCP without options. The bridge may look at the IPv4 header (br_netfilter), and no
    // deeper.
    eth[ETH] = 0x45;
    let ip_len = (eth.len() - ETH) as u16;
    eth[ETH + 2..ETH + 4].copy_from_slice(&ip_len.to_be_bytes());
    eth[ETH + 8..ETH + 10].copy_from_slice(&[64, 6]);
    for (at, mac) in [(12, from), (16, to)] {
        eth[ETH + at..ETH + at + 4].copy_from_slice(&[10, 99, 0, mac[5]]);
    }
    let sum = checksum(&eth[ETH..ETH + 20]);
    eth[ETH + 10..ETH + 12].copy_from_slice(&sum.to_be_bytes());
    eth[ETH + 20 + 12] = 5 << 4;
    f
}

/// The Internet checksum of a header of even length.
fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let sum: u32 = words.sum();
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// Opens both devices and lets the bridge learn who is behind them. The bridge forwards only some
/// time after a device has come up, so the first frames may be lost.
fn open_both(setup: &Setup) -> io::Result<(File, File)> {
    let (mut a, mut b) = (open(&setup.taps[0])?, open(&setup.taps[1])?);
    let mut buffer = vec![0; HEADER + (1 << 16)];
    let (from_a, from_b) = (frame(64, MACS[0], MACS[1]), frame(64, MACS[1], MACS[0]));
    let since = Instant::now();
    loop {
        a.write_all(&from_a)?;
        match await_frame(&mut b, &mut buffer, &from_a) {
            Err(e) if e.kind() == ErrorKind::TimedOut && since.elapsed() < FORWARDS => {}
            done => break done?,
        }
    }
    b.write_all(&from_b)?;
    await_frame(&mut a, &mut buffer, &from_b)?;
    // What was sent in vain may still come, and is not counted.
    while read_now(&mut b, &mut buffer)?.is_some() {}
    Ok((a, b))
}

fn open(name: &str) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    // SAFETY: all zero is a valid `ifreq`: it is plain data.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags =
        (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    let header: libc::c_int = HEADER as libc::c_int;
    let offloads = libc::c_ulong::from(libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6);
    // SAFETY: `request` and `header` live across the calls, which read what their numbers say.
    let done = unsafe {
        [
            libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw const request),
            libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ as _, &raw const header),
            libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD as _, offloads),
        ]
    };
    if done.iter().all(|rc| *rc >= 0) { Ok(file) } else { Err(io::Error::last_os_error()) }
}

/// CPU time of all threads, and how long the busiest was ready to run and did not.
struct Meter(usage::Snapshot);

impl Meter {
    fn start() -> Meter {
        Meter(usage::snapshot(&[std::process::id()]))
    }

    fn add(&self, r: Reading) -> Reading {
        let Some(usage) = usage::snapshot(&[std::process::id()]).since(&self.0) else { return r };
        let cpu_us_per_op = Some(usage.cpu * 1e6 / r.ops_per_s.max(1e-9));
        Reading { cpu_delay_ns: usage.delay * r.seconds * 1e9, cpu_us_per_op, ..r }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_frames_are_plain_and_large_ones_are_super_packets() {
        let small = frame(64, MACS[0], MACS[1]);
        assert_eq!(small.len(), HEADER + 64);
        assert_eq!(small[..HEADER], [0; HEADER]);
        assert_eq!(small[HEADER..HEADER + 6], MACS[1]);
        assert_eq!(checksum(&small[HEADER + ETH..HEADER + ETH + 20]), 0, "it is in there");
        let large = frame(65_535, MACS[0], MACS[1]);
        assert_eq!(large[..6], [1, 1, 54, 0, 0xa8, 5]);
        assert_eq!(large[HEADER + 16..HEADER + 18], 65_521u16.to_be_bytes());
    }

    #[test]
    fn figures_follow_from_count_and_time() {
        let r = reading(500, 0.5, 64.0);
        assert_eq!((r.ops_per_s, r.bytes_per_s), (1000.0, 64_000.0));
    }
}

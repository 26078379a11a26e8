//! The load of the TAP and bridge reference: a program of its own within this one (`bench tap`), so
//! that its CPU time can be told from ours. It prints what a front end prints.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::front::Reading;

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

/// What to do.
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

/// As many frames as go from the first device to the second, a thread at each end.
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
    let (mut started, mut delay_ns, mut count) = (None, 0, 0u64);
    loop {
        let n = read_now(b, &mut buffer)?.unwrap_or(0);
        let now = Instant::now();
        let Some(begin) = started else {
            if now >= from {
                started = Some(now);
                delay_ns = waited_ns();
            }
            continue;
        };
        count += u64::from(n == len);
        let seconds = now.duration_since(begin).as_secs_f64();
        if seconds >= setup.length.as_secs_f64() {
            let cpu_delay_ns = (waited_ns() - delay_ns) as f64;
            let bytes = setup.frame_bytes as f64;
            return Ok(Reading { cpu_delay_ns, ..reading(count, seconds, bytes) });
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
    let mut delay_ns = waited_ns();
    while last.duration_since(begin) < setup.warm_up + setup.length && took_ns.len() < MAX_SAMPLES {
        a.write_all(&there)?;
        await_frame(&mut b, &mut buffer, &there)?;
        b.write_all(&back)?;
        await_frame(&mut a, &mut buffer, &back)?;
        let now = Instant::now();
        if last.duration_since(begin) < setup.warm_up {
            delay_ns = waited_ns();
        } else {
            took_ns.push(now.duration_since(last).as_nanos().min(u128::from(u32::MAX)) as u32);
        }
        last = now;
    }
    took_ns.sort_unstable();
    let at = |percent: usize| took_ns.get(took_ns.len() * percent / 100).map(|ns| f64::from(*ns));
    let seconds = took_ns.iter().map(|ns| f64::from(*ns)).sum::<f64>() / 1e9;
    Ok(Reading {
        p50_ns: at(50),
        p99_ns: at(99),
        cpu_delay_ns: (waited_ns() - delay_ns) as f64,
        ..reading(took_ns.len() as u64, seconds, setup.frame_bytes as f64)
    })
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
            Some(n) if buffer[HEADER..n] == want[HEADER..] => return Ok(()),
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
    // IPv4 without options, TCP without options; the bridge looks no deeper.
    eth[ETH] = 0x45;
    let ip_len = (eth.len() - ETH) as u16;
    eth[ETH + 2..ETH + 4].copy_from_slice(&ip_len.to_be_bytes());
    eth[ETH + 8..ETH + 10].copy_from_slice(&[64, 6]);
    eth[ETH + 20 + 12] = 5 << 4;
    f
}

/// Opens both devices and lets the bridge learn who is behind them.
fn open_both(setup: &Setup) -> io::Result<(File, File)> {
    let (mut a, mut b) = (open(&setup.taps[0])?, open(&setup.taps[1])?);
    let mut buffer = vec![0; HEADER + (1 << 16)];
    let (from_a, from_b) = (frame(64, MACS[0], MACS[1]), frame(64, MACS[1], MACS[0]));
    a.write_all(&from_a)?;
    await_frame(&mut b, &mut buffer, &from_a)?;
    b.write_all(&from_b)?;
    await_frame(&mut a, &mut buffer, &from_b)?;
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

/// How long this thread has been ready to run and did not.
fn waited_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_ascii_whitespace().nth(1).and_then(|f| f.parse().ok()).unwrap_or(0)
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
        let large = frame(65_536, MACS[0], MACS[1]);
        assert_eq!(large[..6], [1, 1, 54, 0, 0xa8, 5]);
        assert_eq!(large[HEADER + 16..HEADER + 18], 65_522u16.to_be_bytes());
    }

    #[test]
    fn figures_follow_from_count_and_time() {
        let r = reading(500, 0.5, 64.0);
        assert_eq!((r.ops_per_s, r.bytes_per_s), (1000.0, 64_000.0));
    }
}

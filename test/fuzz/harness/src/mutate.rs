//! A small fuzzer that knows nothing of the code it runs: seeds, and random changes of them.

use std::backtrace::Backtrace;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Longest input, unless a seed is longer.
const MAX_LEN_BYTES: usize = 4096;
/// Time for a target, unless the environment says otherwise.
const SECONDS: u64 = 5;
/// The random numbers, unless the environment says otherwise.
const SEED: u64 = 1;
/// Numbers at the edges of what formats and code can hold.
const EDGES: [u64; 14] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    1 << 63,
    u64::MAX,
];

/// Random numbers (SplitMix64): the same seed, the same numbers. `base` has the same, but this is
/// built in a workspace where nothing else needs what that brings.
struct Numbers(u64);

impl Numbers {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    fn below(&mut self, bound: usize) -> usize {
        (self.next_u64() % bound as u64) as usize
    }
}

/// Runs a target on the files that are named, or on its seeds and on changes of them: for
/// `FUZZ_SECONDS`, from the random numbers of `FUZZ_SEED`.
pub fn run(target: &str, files: &[PathBuf], one: impl Fn(&[u8])) -> ExitCode {
    let run = if files.is_empty() { search(target, &one) } else { replay(files, &one) };
    match run {
        Ok(told) => {
            println!("{target}: {told}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{target}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn replay(files: &[PathBuf], one: &impl Fn(&[u8])) -> io::Result<String> {
    for file in files {
        one(&fs::read(file)?);
    }
    Ok(format!("{} files", files.len()))
}

fn search(target: &str, one: &impl Fn(&[u8])) -> io::Result<String> {
    let number = |name, otherwise| {
        let text = std::env::var(name).ok();
        text.map_or(Ok(otherwise), |text| text.parse().map_err(io::Error::other))
    };
    let (seconds, seed) = (number("FUZZ_SECONDS", SECONDS)?, number("FUZZ_SEED", SEED)?);
    let until = Instant::now() + Duration::from_secs(seconds);
    let seeds = seeds(target)?;
    let kept = Kept::new(target, seed)?;
    for seed in &seeds {
        kept.run(seed, one)?;
    }
    let (mut random, mut count) = (Numbers(seed), 0u64);
    while Instant::now() < until {
        kept.run(&changed(&seeds, &mut random), one)?;
        count += 1;
    }
    fs::remove_file(&kept.path)?;
    Ok(format!("{} seeds, {count} changes of them by FUZZ_SEED={seed}", seeds.len()))
}

/// The input that is being run, in a file: it is there however the process ends.
struct Kept {
    path: PathBuf,
    file: File,
}

impl Kept {
    fn new(target: &str, seed: u64) -> io::Result<Self> {
        let folder = folder("artifacts", target);
        fs::create_dir_all(&folder)?;
        let path = folder.join(format!("input-{}", std::process::id()));
        let file = File::create(&path)?;
        let text = format!("{target}: FUZZ_SEED={seed}, the input is in {}", path.display());
        // Whichever thread panics. A test's output would be lost with the process, but not what is
        // written so.
        std::panic::set_hook(Box::new(move |info| {
            let told = format!("{info}\n{}\n{text}\n", Backtrace::capture());
            let _ = io::stderr().write_all(told.as_bytes());
            std::process::abort();
        }));
        Ok(Self { path, file })
    }

    fn run(&self, bytes: &[u8], one: &impl Fn(&[u8])) -> io::Result<()> {
        self.file.write_all_at(bytes, 0)?;
        self.file.set_len(bytes.len() as u64)?;
        one(bytes);
        Ok(())
    }
}

fn folder(kind: &str, target: &str) -> PathBuf {
    let harness = Path::new(env!("CARGO_MANIFEST_DIR"));
    harness.parent().unwrap_or(harness).join(kind).join(target)
}

/// In the order of their names, so that the same inputs come in each run.
fn seeds(target: &str) -> io::Result<Vec<Vec<u8>>> {
    let folder = folder("seeds", target);
    let named = |error: io::Error| io::Error::other(format!("{}: {error}", folder.display()));
    let entries = fs::read_dir(&folder).map_err(named)?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort();
    if paths.is_empty() {
        return Err(named(io::ErrorKind::NotFound.into()));
    }
    paths.iter().map(fs::read).collect()
}

/// A seed with some changes.
fn changed(seeds: &[Vec<u8>], random: &mut Numbers) -> Vec<u8> {
    let any = |random: &mut Numbers| &seeds[random.below(seeds.len())];
    let mut bytes = any(random).clone();
    let most = MAX_LEN_BYTES.max(bytes.len());
    for _ in 0..=random.below(8) {
        let other = any(random);
        change(&mut bytes, other, random);
    }
    bytes.truncate(most);
    bytes
}

fn change(bytes: &mut Vec<u8>, other: &[u8], random: &mut Numbers) {
    let at = random.below(bytes.len() + 1);
    let len = random.below((bytes.len() - at).min(64) + 1);
    match random.below(8) {
        0 => bytes.truncate(at),
        1 => drop(bytes.drain(at..at + len)),
        2 => {
            let again = bytes[at..at + len].to_vec();
            let to = random.below(bytes.len() + 1);
            bytes.splice(to..to, again);
        }
        3 => {
            let from = random.below(other.len() + 1);
            let end = from + random.below((other.len() - from) + 1);
            bytes.splice(at..at + len, other[from..end].iter().copied());
        }
        4 => {
            let new = (0..=random.below(8)).map(|_| random.next_u64() as u8).collect::<Vec<_>>();
            bytes.splice(at..at, new);
        }
        5 | 6 => write_edge(&mut bytes[at..], random),
        _ => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
    }
}

/// Writes a number of one to eight bytes, in either order, that is near an edge.
fn write_edge(bytes: &mut [u8], random: &mut Numbers) {
    let edge = EDGES[random.below(EDGES.len())];
    let number = edge.wrapping_add(random.below(5) as u64).wrapping_sub(2).to_le_bytes();
    let len = bytes.len().min(1 << random.below(4));
    bytes[..len].copy_from_slice(&number[..len]);
    if random.below(2) == 0 {
        bytes[..len].reverse();
    }
}

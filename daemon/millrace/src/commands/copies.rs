//! `module backup | verify | restore`: copies of modules' files as people handle them.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, BufWriter, ErrorKind, IsTerminal, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use control::client::{Client, encode};
use modules::copy::{self, Summary};

use super::{CommandResult, pretty, refused};
use crate::cli::{ModuleBackup, ModuleRestore, ModuleVerify, VmArgs};
use crate::exit;
use crate::process::print_line;

fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

fn path(target: &VmArgs, module: &str, command: &str) -> String {
    format!("/v1/vms/{}/modules/{}/{command}", encode(&target.vm), encode(module))
}

/// File that gets its name once it is whole; dropped before, it is removed.
struct Partial {
    to: PathBuf,
    partial: PathBuf,
    file: File,
    is_complete: bool,
}

/// Destination of a copy.
enum Output {
    /// A file of ours, or one that it replaces.
    File(Partial),
    /// An existing path that is no regular file: a FIFO, a device.
    Special(File),
}

impl Output {
    /// Opens the destination; symbolic links are followed.
    fn open(path: &Path) -> anyhow::Result<Self> {
        let what = || format!("opening {}", path.display());
        match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => bail!("{} is a folder: name a file", path.display()),
            Ok(found) if found.is_file() => {
                Ok(Self::File(Partial::create(&path.canonicalize().with_context(what)?)?))
            }
            Ok(_) => {
                Ok(Self::Special(OpenOptions::new().write(true).open(path).with_context(what)?))
            }
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(Self::File(Partial::create(path)?)),
            Err(e) => Err(e).with_context(what),
        }
    }
}

impl Partial {
    fn create(to: &Path) -> anyhow::Result<Self> {
        let mut name = to.file_name().context("it names no file")?.to_owned();
        name.push(format!(".{}.partial", std::process::id()));
        let partial = to.with_file_name(name);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&partial)
            .with_context(|| format!("making {}", partial.display()))?;
        Ok(Self { to: to.into(), partial, file, is_complete: false })
    }

    /// Gives the file its name, durably.
    fn complete(mut self) -> anyhow::Result<()> {
        let what = || format!("making {} durable", self.to.display());
        self.file.sync_all().with_context(what)?;
        std::fs::rename(&self.partial, &self.to).with_context(what)?;
        self.is_complete = true;
        let folder = self.to.parent().filter(|folder| *folder != Path::new(""));
        let folder = File::open(folder.unwrap_or(Path::new("."))).with_context(what)?;
        folder.sync_all().with_context(what)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.is_complete {
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

fn summary_text(summary: &Summary) -> String {
    let Summary { about, files, files_bytes, copy_bytes } = summary;
    format!(
        "{}/{} of {}: {files} files of {files_bytes} bytes, in a copy of {copy_bytes} bytes",
        about.vm,
        about.module,
        utc(about.begun_s)
    )
}

/// A moment as ISO 8601 has it, in UTC.
fn utc(since_1970_s: u64) -> String {
    let (days, s) = (since_1970_s / 86_400, since_1970_s % 86_400);
    // Years begin in March here, so that leap days are last: 146,097 days are 400 years.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..=9 => (era * 400 + year, month + 3),
        _ => (era * 400 + year + 1, month - 9),
    };
    let (h, min, s) = (s / 3600, s / 60 % 60, s % 60);
    format!("{year:04}-{month:02}-{day:02}T{h:02}:{min:02}:{s:02}Z")
}

/// `module backup`.
pub fn backup(args: &ModuleBackup) -> CommandResult {
    if is_standard(&args.output) && std::io::stdout().is_terminal() {
        bail!("a copy is not for a terminal: name a file, or a pipe behind it");
    }
    let client = Client::new(&args.target.socket.socket);
    let mut from = match client.download(&path(&args.target, &args.module, "backup"))? {
        Ok(from) => from,
        Err(answer) => return Ok(refused(&answer)),
    };
    let what = || format!("the copy of {}/{}", args.target.vm, args.module);
    let summary = if is_standard(&args.output) {
        // The summary goes to the standard error: the output is the copy.
        let mut to = BufWriter::with_capacity(1 << 20, std::io::stdout().lock());
        let summary = copy::pass(&mut from, &mut to).with_context(what)?;
        eprintln!("millrace: {}", summary_text(&summary));
        return Ok(exit::OK);
    } else {
        let output = Output::open(&args.output)?;
        let (Output::File(Partial { file, .. }) | Output::Special(file)) = &output;
        let mut to = BufWriter::with_capacity(1 << 20, file);
        let summary = copy::pass(&mut from, &mut to).with_context(what)?;
        drop(to);
        if let Output::File(partial) = output {
            partial.complete()?;
        }
        summary
    };
    print_summary(&summary, args.json)
}

fn print_summary(summary: &Summary, json: bool) -> CommandResult {
    match json {
        true => print_line(&pretty(&serde_json::to_value(summary)?)?)?,
        false => print_line(&summary_text(summary))?,
    }
    Ok(exit::OK)
}

fn open(path: &Path) -> anyhow::Result<Box<dyn Read>> {
    if is_standard(path) {
        return Ok(Box::new(std::io::stdin().lock()));
    }
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    Ok(Box::new(BufReader::with_capacity(1 << 20, file)))
}

/// `module verify`.
pub fn verify(args: &ModuleVerify) -> CommandResult {
    let mut from = open(&args.copy)?;
    let summary = copy::pass(&mut from, &mut std::io::sink())
        .with_context(|| args.copy.display().to_string())?;
    print_summary(&summary, args.json)
}

/// `module restore`.
pub fn restore(args: &ModuleRestore) -> CommandResult {
    let mut from = open(&args.copy)?;
    let path = format!("{}?replace={}", path(&args.target, &args.module, "restore"), args.replace);
    let answer = Client::new(&args.target.socket.socket).upload(&path, &mut from)?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    let value = answer.json();
    if args.json {
        print_line(&pretty(&value)?)?;
    } else {
        let of = |key: &str| value[key].as_u64().unwrap_or_default();
        print_line(&format!(
            "{}/{}: {} files of {} bytes, of {}",
            args.target.vm,
            args.module,
            of("files"),
            of("files_bytes"),
            value["of_vm"].as_str().unwrap_or_default()
        ))?;
    }
    Ok(exit::OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_the_calendar() {
        for (s, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_827_696, "2000-02-29T12:34:56Z"),
            (1_109_635_199, "2005-02-28T23:59:59Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
        ] {
            assert_eq!(utc(s), text);
        }
    }

    #[test]
    fn what_is_no_file_is_written_into_and_links_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        match Output::open(&link).unwrap() {
            Output::File(partial) => assert_eq!(partial.to, file.canonicalize().unwrap()),
            Output::Special(_) => panic!(),
        }
        assert!(matches!(Output::open(Path::new("/dev/null")).unwrap(), Output::Special(_)));
        let text = Output::open(dir.path()).err().unwrap().to_string();
        assert!(text.ends_with(" is a folder: name a file"), "{text}");
        // What was not whole has gone.
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
        assert_eq!(std::fs::read(&file).unwrap(), b"old");
    }
}

//! `module backup | verify | restore`: copies of modules' files as people handle them.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, BufWriter, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use control::client::{Client, encode};
use modules::copy::{self, Summary};

use crate::cli::{ModuleBackup, ModuleRestore, ModuleVerify, OfVm};
use crate::commands::{Done, pretty, refused};
use crate::exit;
use crate::process::print_line;

fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

fn path(of: &OfVm, module: &str, what: &str) -> String {
    format!("/v1/vms/{}/modules/{}/{what}", encode(&of.vm), encode(module))
}

/// A file that gets its name once it is whole. Dropped before, it goes.
struct Partial {
    to: PathBuf,
    partial: PathBuf,
    file: File,
    kept: bool,
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
        Ok(Self { to: to.into(), partial, file, kept: false })
    }

    /// Durably.
    fn keep(mut self) -> anyhow::Result<()> {
        let what = || format!("making {} durable", self.to.display());
        self.file.sync_all().with_context(what)?;
        std::fs::rename(&self.partial, &self.to).with_context(what)?;
        self.kept = true;
        let folder = self.to.parent().filter(|folder| *folder != Path::new(""));
        let folder = File::open(folder.unwrap_or(Path::new("."))).with_context(what)?;
        folder.sync_all().with_context(what)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

fn say(summary: &Summary) -> String {
    let Summary { about, files, files_bytes, copy_bytes } = summary;
    format!(
        "{}/{}: {files} files of {files_bytes} bytes, in a copy of {copy_bytes} bytes",
        about.vm, about.module
    )
}

/// `module backup`.
pub fn backup(args: &ModuleBackup) -> Done {
    let client = Client::new(&args.of.socket.socket);
    let mut from = match client.download(&path(&args.of, &args.module, "backup"))? {
        Ok(from) => from,
        Err(answer) => return Ok(refused(&answer)),
    };
    let what = || format!("the copy of {}/{}", args.of.vm, args.module);
    let summary = if is_standard(&args.output) {
        // What it says goes elsewhere.
        let mut to = BufWriter::with_capacity(1 << 20, std::io::stdout().lock());
        let summary = copy::pass(&mut from, &mut to).with_context(what)?;
        eprintln!("millrace: {}", say(&summary));
        return Ok(exit::OK);
    } else {
        let partial = Partial::create(&args.output)?;
        let mut to = BufWriter::with_capacity(1 << 20, &partial.file);
        let summary = copy::pass(&mut from, &mut to).with_context(what)?;
        drop(to);
        partial.keep()?;
        summary
    };
    tell(&summary, args.json)
}

fn tell(summary: &Summary, json: bool) -> Done {
    match json {
        true => print_line(&pretty(&serde_json::to_value(summary)?)?)?,
        false => print_line(&say(summary))?,
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
pub fn verify(args: &ModuleVerify) -> Done {
    let mut from = open(&args.copy)?;
    let summary = copy::pass(&mut from, &mut std::io::sink())
        .with_context(|| args.copy.display().to_string())?;
    tell(&summary, args.json)
}

/// `module restore`.
pub fn restore(args: &ModuleRestore) -> Done {
    let mut from = open(&args.copy)?;
    let path = format!("{}?replace={}", path(&args.of, &args.module, "restore"), args.replace);
    let answer = Client::new(&args.of.socket.socket).upload(&path, &mut from)?;
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
            args.of.vm,
            args.module,
            of("files"),
            of("files_bytes"),
            value["of_vm"].as_str().unwrap_or_default()
        ))?;
    }
    Ok(exit::OK)
}

//! Kernel modules: built for the cached kernels, checked, packed for DKMS, loaded in guests.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lab::{Cache, Guest, Image, Kernel, KernelChoice, Lab, apt, kmod};

const BOOT: Duration = Duration::from_secs(180);

/// A module of one file, with Kbuild and Makefile of the real ones.
struct Scratch {
    folder: tempfile::TempDir,
    cache: Cache,
    kernel: Kernel,
}

impl Scratch {
    fn new(choice: KernelChoice) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["Kbuild", "Makefile"] {
            fs::copy(kmod::sources().join(name), folder.path().join(name)).unwrap();
        }
        let header = folder.path().join("include/none.h");
        fs::create_dir(header.parent().unwrap()).unwrap();
        fs::write(header, "").unwrap();
        let cache = Cache::open().unwrap();
        let kernel = Kernel::get(&cache, choice).unwrap();
        Self { folder, cache, kernel }
    }

    /// Writes the module, with some lines inside its only function.
    fn write(&self, inside: &str) {
        let text = format!(
            "// SPDX-License-Identifier: GPL-2.0\n#include <linux/module.h>\n\n\
             static int __init start(void)\n{{\n{inside}\treturn 0;\n}}\n\nmodule_init(start);\n\
             MODULE_DESCRIPTION(\"scratch\");\nMODULE_LICENSE(\"GPL\");\n"
        );
        fs::write(self.folder.path().join("channel_scratch.c"), text).unwrap();
    }

    fn build(&self) -> Result<PathBuf, lab::LabError> {
        kmod::build(&self.cache, &self.kernel, self.folder.path())
    }
}

#[test]
fn changed_sources_are_built_and_every_warning_is_told() {
    let scratch = Scratch::new(KernelChoice::V6_12);
    scratch.write("\tpr_info(\"first\\n\");\n");
    let first = scratch.build().unwrap();
    assert_eq!(first, scratch.build().unwrap());
    let module = fs::read(first.join("millrace_channel.ko")).unwrap();
    assert!(String::from_utf8_lossy(&module).contains("first"));
    assert_eq!(fs::read_dir(scratch.folder.path()).unwrap().count(), 4, "nothing is left there");

    scratch.write("\tint unused;\n\n\tmissing();\n");
    let error = scratch.build().unwrap_err().to_string();
    let file = scratch.folder.path().join("channel_scratch.c");
    assert!(error.contains(&format!("{}:6:", file.display())), "{error}");
    assert!(error.contains("unused variable") && error.contains("‘missing’"), "{error}");

    scratch.write("\tpr_info(\"second\\n\");\n");
    let second = scratch.build().unwrap();
    assert_ne!(first, second);
    for built in [first, second] {
        fs::remove_dir_all(built).unwrap();
    }
}

#[test]
fn types_and_style_are_checked() {
    let scratch = Scratch::new(KernelChoice::V6_1);
    scratch.write("\t__le32 wrong = 1;\n\n\tpr_info(\"%u\\n\", le32_to_cpu(wrong));\n");
    let error = kmod::check_types(&scratch.cache, &scratch.kernel, scratch.folder.path());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("channel_scratch.c:6:") && error.contains("__le32"), "{error}");

    let style = || kmod::check_style(&scratch.cache, scratch.folder.path());
    style().unwrap();
    scratch.write("  if(1)\n\t\treturn 1;\n");
    let error = style().unwrap_err().to_string();
    assert!(error.contains("channel_scratch.c:6:"), "{error}");
}

/// Debian's own DKMS makes the modules of the installed sources.
#[test]
fn dkms_builds_and_installs_the_modules() {
    let lab = Lab::new().unwrap();
    let dkms = apt::unpacked(lab.cache(), "dkms").unwrap().join("usr/sbin/dkms");
    let sources = lab.path("src");
    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(output.status.success(), "{command:?}: {}", said.concat());
        said[0].clone()
    };
    let folder = format!("SRCDIR={}", sources.display());
    run(Command::new("make").arg("-C").arg(kmod::sources()).args(["install", &folder]));
    for choice in KernelChoice::CURRENT {
        let release = lab.kernel(choice).unwrap().release().to_owned();
        let headers = lab.kernel_headers(choice).unwrap();
        let [tree, installed] = ["tree", "lib"].map(|name| lab.path(&format!("{name}-{choice}")));
        // DKMS wants the folder of the kernel's own modules to be there.
        for folder in [&tree, &installed.join(&release)] {
            fs::create_dir_all(folder).unwrap();
        }
        let mut command = Command::new(&dkms);
        command.args(["install", "-m", "millrace", "-v", env!("CARGO_PKG_VERSION")]);
        command.args(["--no-depmod", "-k", &release]);
        command.arg("--sourcetree").arg(&sources).arg("--dkmstree").arg(&tree);
        command.arg("--installtree").arg(&installed).arg("--kernelsourcedir").arg(&headers);
        run(&mut command);
        for module in ["millrace_channel", "millrace_net"] {
            let module = module_in(&installed.join(&release).join("updates/dkms"), module);
            let magic = run(Command::new("/sbin/modinfo").args(["-F", "vermagic"]).arg(&module));
            assert_eq!(magic.split(' ').next(), Some(release.as_str()), "{magic}");
        }
    }
}

/// DKMS compresses modules when those of a kernel on the host are compressed.
fn module_in(folder: &Path, name: &str) -> PathBuf {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = files.collect();
    let start = format!("{name}.ko");
    files.retain(|path| path.file_name().unwrap().to_string_lossy().starts_with(&start));
    assert_eq!(files.len(), 1, "{files:?}");
    files.remove(0)
}

#[test]
fn guests_of_both_kernels_load_and_unload_the_modules() {
    let lab = Lab::new().unwrap();
    let describe = |choice: KernelChoice| {
        let guest = Guest::builder(format!("a{}", choice.to_string().replace('.', "-")));
        guest.kernel(choice).image(Image::builder().kmod())
    };
    for guest in lab::boot(&lab, KernelChoice::CURRENT.map(describe), BOOT).unwrap() {
        let loaded = "lsmod | cut -d ' ' -f 1 | grep ^millrace | sort | xargs";
        let script = format!(
            "modprobe millrace_net && {loaded} && rmmod millrace_net && rmmod millrace_channel
             insmod /kmod/millrace_channel.ko && {loaded} && rmmod millrace_channel && lsmod | grep -c millrace || true"
        );
        let told = guest.sh(&script).unwrap();
        assert_eq!(told, "millrace_channel millrace_net\nmillrace_channel\n0");
        guest.check().unwrap();
    }
}

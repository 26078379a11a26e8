//! Files of kernel modules that a guest needs, in load order, from what `depmod` wrote.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;

use crate::LabError;

/// The dependency tables of one kernel's module folder.
#[derive(Debug, Default)]
pub struct ModuleTable {
    /// Module name → its path, relative to the folder.
    paths: HashMap<String, String>,
    /// Module name → names it needs.
    needs: HashMap<String, Vec<String>>,
    /// Module name → exact aliases.
    aliases: HashMap<String, Vec<String>>,
    /// Names built into the kernel.
    builtin: HashSet<String>,
}

/// One module with all that must be loaded before it.
#[derive(Debug, PartialEq, Eq)]
pub struct Resolved {
    /// Name, with underscores.
    pub name: String,
    /// Other names the kernel asks for it by.
    pub aliases: Vec<String>,
    /// Paths relative to the module folder in load order, the module itself last.
    pub paths: Vec<String>,
}

/// `kernel/net/foo-bar.ko.xz` → `foo_bar`
fn name_of(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

impl ModuleTable {
    /// Reads `modules.dep`, `modules.softdep`, `modules.alias` and `modules.builtin` of a folder.
    ///
    /// # Errors
    /// A table is missing.
    pub fn read(folder: &Path) -> Result<Self, LabError> {
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read_to_string(&path).map_err(LabError::io(format!("read {}", path.display())))
        };
        Ok(Self::parse(
            &read("modules.dep")?,
            &read("modules.softdep")?,
            &read("modules.alias")?,
            &read("modules.builtin")?,
        ))
    }

    /// Parses the four tables (`modules.dep(5)`, `modprobe.d(5)` for the softdep and alias lines).
    #[must_use]
    pub fn parse(dep: &str, softdep: &str, alias: &str, builtin: &str) -> Self {
        let mut table = Self::default();
        for (path, needs) in dep.lines().filter_map(|line| line.split_once(':')) {
            let name = name_of(path);
            let needs = needs.split_ascii_whitespace().map(name_of).collect();
            table.paths.insert(name.clone(), path.to_owned());
            table.needs.insert(name, needs);
        }
        table.builtin = builtin.lines().map(name_of).collect();
        for line in alias.lines().filter_map(|line| line.strip_prefix("alias ")) {
            if let Some((alias, name)) = line.split_once(' ')
                && !alias.contains(['*', '?', '['])
            {
                let aliases: &mut Vec<String> =
                    table.aliases.entry(name.replace('-', "_")).or_default();
                // depmod repeats an alias once for each device table that has it.
                if !aliases.iter().any(|known| known == alias) {
                    aliases.push(alias.to_owned());
                }
            }
        }
        for line in softdep.lines().filter_map(|line| line.strip_prefix("softdep ")) {
            let mut words = line.split_ascii_whitespace();
            let Some(name) = words.next().map(|name| name.replace('-', "_")) else { continue };
            let before = words.skip_while(|word| *word != "pre:").skip(1);
            for word in before.take_while(|word| *word != "post:") {
                if let Some(found) = table.find(word) {
                    table.needs.entry(name.clone()).or_default().push(found);
                }
            }
        }
        table
    }

    /// Adds a module that is not in the folder, by its absolute path in the guest; its name.
    pub fn add(&mut self, path: &str, needs: &[String]) -> String {
        let name = name_of(path);
        self.paths.insert(name.clone(), path.to_owned());
        self.needs.insert(name.clone(), needs.to_vec());
        name
    }

    /// A loadable module's name for a name or alias.
    fn find(&self, wanted: &str) -> Option<String> {
        let name = wanted.replace('-', "_");
        if self.paths.contains_key(&name) {
            return Some(name);
        }
        let mut having: Vec<&String> = self
            .aliases
            .iter()
            .filter(|(_, aliases)| aliases.iter().any(|alias| alias == wanted))
            .map(|(name, _)| name)
            .collect();
        // Several modules may implement one thing; take the same one every time.
        having.sort();
        having.first().map(|name| (*name).clone())
    }

    /// The module with its dependencies; `None` when it is built into the kernel.
    ///
    /// # Errors
    /// The kernel does not have it at all.
    pub fn resolve(&self, wanted: &str) -> Result<Option<Resolved>, LabError> {
        let Some(name) = self.find(wanted) else {
            if self.builtin.contains(&wanted.replace('-', "_")) {
                return Ok(None);
            }
            return Err(LabError::Missing {
                what: format!("kernel module {wanted}"),
                remedy: "the kernel package has no such module; leave it out".into(),
            });
        };
        let mut paths = Vec::new();
        self.visit(&name, &mut HashSet::new(), &mut paths);
        let aliases = self.aliases.get(&name).cloned().unwrap_or_default();
        Ok(Some(Resolved { name, aliases, paths }))
    }

    /// Depth first, so that what is needed comes first; `seen` also ends a cycle.
    fn visit(&self, name: &str, seen: &mut HashSet<String>, paths: &mut Vec<String>) {
        if !seen.insert(name.to_owned()) {
            return;
        }
        for need in self.needs.get(name).into_iter().flatten() {
            self.visit(need, seen, paths);
        }
        if let Some(path) = self.paths.get(name) {
            paths.push(path.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> ModuleTable {
        ModuleTable::parse(
            "kernel/a/virtio.ko: kernel/a/virtio_ring.ko\n\
             kernel/a/virtio_ring.ko:\n\
             kernel/n/net-failover.ko: kernel/n/failover.ko\n\
             kernel/n/failover.ko:\n\
             kernel/n/virtio_net.ko.xz: kernel/n/net-failover.ko kernel/n/failover.ko \
              kernel/a/virtio.ko kernel/a/virtio_ring.ko\n\
             kernel/f/btrfs.ko: kernel/l/xor.ko\n\
             kernel/l/xor.ko:\n\
             kernel/c/crc32c_generic.ko:\n\
             kernel/x/one.ko: kernel/x/two.ko\n\
             kernel/x/two.ko: kernel/x/one.ko\n",
            "# comment\nsoftdep btrfs pre: crc32c missing post: late\n",
            "alias fs-btrfs btrfs\nalias pci:v*d* virtio_net\nalias crc32c crc32c_generic\n",
            "kernel/fs/ext4/ext4.ko\n",
        )
    }

    #[test]
    fn what_is_needed_comes_first_and_once() {
        let got = table().resolve("virtio-net").unwrap().unwrap();
        assert_eq!(got.name, "virtio_net");
        let at = |end: &str| got.paths.iter().position(|path| path.contains(end)).unwrap();
        assert!(at("virtio_ring") < at("virtio.ko"));
        assert!(at("/failover") < at("net-failover"));
        assert_eq!(got.paths.len(), 5);
        assert_eq!(got.paths[4], "kernel/n/virtio_net.ko.xz");
        assert!(got.aliases.is_empty(), "patterns are left out");
    }

    #[test]
    fn an_added_module_follows_what_it_needs() {
        let mut table = table();
        let needs = ["virtio".to_owned(), "ours_too".to_owned(), "built_in".to_owned()];
        assert_eq!(table.add("/kmod/ours.ko", &needs), "ours");
        table.add("/kmod/ours-too.ko", &["failover".to_owned()]);
        let want = ["kernel/a/virtio_ring.ko", "kernel/a/virtio.ko", "kernel/n/failover.ko"];
        let ours = ["/kmod/ours-too.ko", "/kmod/ours.ko"];
        assert_eq!(table.resolve("ours").unwrap().unwrap().paths, [&want[..], &ours].concat());
    }

    #[test]
    fn soft_dependencies_follow_aliases() {
        let got = table().resolve("btrfs").unwrap().unwrap();
        assert_eq!(
            got.paths,
            ["kernel/l/xor.ko", "kernel/c/crc32c_generic.ko", "kernel/f/btrfs.ko"]
        );
        assert_eq!(got.aliases, ["fs-btrfs"]);
    }

    #[test]
    fn built_in_and_unknown_differ_and_a_cycle_ends() {
        assert_eq!(table().resolve("ext4").unwrap(), None);
        let error = table().resolve("nothing").unwrap_err().to_string();
        assert!(error.contains("nothing"), "{error}");
        assert_eq!(table().resolve("one").unwrap().unwrap().paths.len(), 2);
    }
}

//! Packages of the tree, from their `Cargo.toml`.

use toml::{Table, Value};

use crate::tree::{SourceFile, Tree};

/// A dependency on another package of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dependency {
    /// Folder of the other package.
    pub folder: String,
    /// Whether only tests, benches and examples have it.
    pub is_dev: bool,
    /// Line in `Cargo.toml`, counted from 1.
    pub line: usize,
}

/// A package.
#[derive(Debug)]
pub struct Package {
    /// Name.
    pub name: String,
    /// Folder, from the root of the tree.
    pub folder: String,
    /// Root files of its library and binaries that exist.
    pub roots: Vec<String>,
    /// Dependencies on packages of the tree.
    pub dependencies: Vec<Dependency>,
}

/// Reads all packages, sorted by folder.
pub fn read(tree: &Tree) -> Vec<Package> {
    let manifests: Vec<(&SourceFile, Table)> = tree
        .files
        .iter()
        .filter(|f| f.path.rsplit('/').next() == Some("Cargo.toml"))
        .filter_map(|f| Some((f, f.text.parse::<Table>().ok()?)))
        .collect();
    let mut packages: Vec<Package> = manifests
        .iter()
        .filter_map(|(file, manifest)| {
            let name = manifest.get("package")?.get("name")?.as_str()?.to_owned();
            let folder = parent(&file.path).to_owned();
            let roots = roots(tree, manifest, &folder);
            let dependencies = dependencies(file, manifest, &manifests);
            Some(Package { name, folder, roots, dependencies })
        })
        .collect();
    packages.sort_by(|a, b| a.folder.cmp(&b.folder));
    packages
}

/// Folder of a path; empty for a name without one.
pub fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// Path `relative` from `folder`, with `.` and `..` resolved.
pub fn join(folder: &str, relative: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|p| !p.is_empty()).collect();
    for part in relative.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            name => parts.push(name),
        }
    }
    parts.join("/")
}

fn roots(tree: &Tree, manifest: &Table, folder: &str) -> Vec<String> {
    let path_of = |table: &Value| table.get("path")?.as_str().map(|p| join(folder, p));
    let mut roots = vec![join(folder, "src/lib.rs"), join(folder, "src/main.rs")];
    roots.extend(manifest.get("lib").and_then(path_of));
    if let Some(Value::Array(bins)) = manifest.get("bin") {
        roots.extend(bins.iter().filter_map(path_of));
    }
    let bins = join(folder, "src/bin");
    roots.extend(tree.files.iter().filter(|f| parent(&f.path) == bins).map(|f| f.path.clone()));
    roots.retain(|path| tree.file(path).is_some());
    roots.sort();
    roots.dedup();
    roots
}

fn dependencies(
    file: &SourceFile,
    manifest: &Table,
    manifests: &[(&SourceFile, Table)],
) -> Vec<Dependency> {
    let folder = parent(&file.path);
    let mut found = Vec::new();
    let mut tables: Vec<&Table> = vec![manifest];
    if let Some(Value::Table(targets)) = manifest.get("target") {
        tables.extend(targets.values().filter_map(Value::as_table));
    }
    for table in tables {
        for (section, is_dev) in
            [("dependencies", false), ("build-dependencies", false), ("dev-dependencies", true)]
        {
            let Some(Value::Table(entries)) = table.get(section) else { continue };
            for (name, entry) in entries {
                if let Some(to) = dependency_folder(folder, name, entry, manifests) {
                    let line = line_of(&file.text, name, is_dev);
                    found.push(Dependency { folder: to, is_dev, line });
                }
            }
        }
    }
    found
}

/// Folder of a dependency of the tree: from `path`, or from the workspace above.
fn dependency_folder(
    folder: &str,
    name: &str,
    entry: &Value,
    manifests: &[(&SourceFile, Table)],
) -> Option<String> {
    if let Some(path) = entry.get("path") {
        return Some(join(folder, path.as_str()?));
    }
    if entry.get("workspace").and_then(Value::as_bool) != Some(true) {
        return None;
    }
    let is_above = |file: &SourceFile| {
        let root = parent(&file.path);
        root.is_empty() || crate::config::is_under(folder, root)
    };
    let (file, workspace) = manifests
        .iter()
        .filter(|(file, manifest)| manifest.contains_key("workspace") && is_above(file))
        .max_by_key(|(file, _)| file.path.len())?;
    let path = workspace.get("workspace")?.get("dependencies")?.get(name)?.get("path")?;
    Some(join(parent(&file.path), path.as_str()?))
}

fn line_of(text: &str, name: &str, is_dev: bool) -> usize {
    let mut in_dev = false;
    for (i, line) in text.lines().enumerate() {
        if line.starts_with('[') {
            in_dev = line.contains("dev-dependencies");
        }
        let is_entry = line.strip_prefix(name).is_some_and(|r| r.starts_with([' ', '=', '.']));
        if in_dev == is_dev && is_entry {
            return i + 1;
        }
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_found_by_path_and_by_workspace() {
        let tree = Tree::from_sources(&[
            ("Cargo.toml", "[workspace.dependencies]\nbase = { path = 'crates/base' }\ntoml = '1'"),
            ("crates/base/Cargo.toml", "[package]\nname = 'base'"),
            ("crates/base/src/lib.rs", ""),
            (
                "lab/Cargo.toml",
                "[package]\nname = 'lab'\n[dependencies]\nbase = { workspace = true }\n\
                 toml = { workspace = true }\n[dev-dependencies]\nagent = { path = '../agent' }\n",
            ),
        ]);
        let packages = read(&tree);
        assert_eq!(packages[0].roots, ["crates/base/src/lib.rs"]);
        let base = Dependency { folder: "crates/base".to_owned(), is_dev: false, line: 4 };
        let agent = Dependency { folder: "agent".to_owned(), is_dev: true, line: 7 };
        assert_eq!(packages[1].dependencies, [base, agent]);
    }
}

//! `rooms`: imports between packages point down the tables of rooms in `ARCHITECTURE.md`, and the
//! tables and the tree have the same rooms.
//!
//! A room imports from rows below its own, and from all tables before its own.

use crate::config::is_under;
use crate::facts::Facts;
use crate::finding::Finding;
use crate::packages::join;

/// Name of the rule.
pub const NAME: &str = "rooms";

const MAP: &str = "ARCHITECTURE.md";
const HEADING: &str = "## Rooms";

/// A folder of a table.
#[derive(Debug)]
struct Room {
    folder: String,
    /// Table, from the top.
    table: usize,
    /// Line of the row in the map, counted from 1.
    line: usize,
}

impl Room {
    fn may_import(&self, other: &Room) -> bool {
        match self.table == other.table {
            true => other.line > self.line || other.folder == self.folder,
            false => other.table < self.table,
        }
    }
}

/// Finds arrows up, packages without a room and rooms without a folder.
pub fn find(facts: &Facts, out: &mut Vec<Finding>) {
    let Some(map) = facts.tree.file(MAP) else {
        out.push(Finding::new(NAME, MAP, 1, "is missing"));
        return;
    };
    let rooms = rooms(&map.text);
    if rooms.is_empty() {
        out.push(Finding::new(NAME, MAP, 1, format!("no table under `{HEADING}`")));
        return;
    }
    for room in rooms.iter().filter(|r| !facts.tree.paths.contains(&r.folder)) {
        let text = format!("room `{}` is no folder", room.folder);
        out.push(Finding::new(NAME, MAP, room.line, text));
    }
    for package in &facts.packages {
        let manifest = join(&package.folder, "Cargo.toml");
        let Some(from) = room_of(&rooms, &package.folder) else {
            let text = format!("package `{}` is in no room of {MAP}", package.name);
            out.push(Finding::new(NAME, &manifest, 1, text));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|d| !d.is_dev) {
            let Some(to) = room_of(&rooms, &dependency.folder) else { continue };
            if !from.may_import(to) {
                let (to, from) = (&to.folder, &from.folder);
                let text = format!("`{from}` imports `{to}`, which is not below it in {MAP}");
                out.push(Finding::new(NAME, &manifest, dependency.line, text));
            }
        }
    }
}

/// Arrows up that only tests have: they are right, and worth knowing.
pub fn arrows_of_tests(facts: &Facts) -> Vec<String> {
    let rooms = facts.tree.file(MAP).map(|map| rooms(&map.text)).unwrap_or_default();
    let mut found = Vec::new();
    for package in &facts.packages {
        for dependency in package.dependencies.iter().filter(|d| d.is_dev) {
            let from = room_of(&rooms, &package.folder);
            let Some((from, to)) = from.zip(room_of(&rooms, &dependency.folder)) else { continue };
            if !from.may_import(to) {
                found.push(format!("{} -> {}", package.folder, dependency.folder));
            }
        }
    }
    found
}

/// Room with the longest folder that a package lies in.
fn room_of<'a>(rooms: &'a [Room], folder: &str) -> Option<&'a Room> {
    rooms.iter().filter(|r| is_under(folder, &r.folder)).max_by_key(|r| r.folder.len())
}

/// Folders in backquotes in the first column of the tables.
fn rooms(text: &str) -> Vec<Room> {
    let lines = text.lines().enumerate().skip_while(|(_, l)| l.trim() != HEADING).skip(1);
    let mut rooms = Vec::new();
    let (mut table, mut was_row) = (0, false);
    for (i, line) in lines.take_while(|(_, l)| !l.starts_with("## ")) {
        let cell = line.strip_prefix('|').and_then(|l| l.split('|').next());
        table += usize::from(cell.is_some() && !was_row);
        was_row = cell.is_some();
        for folder in cell.unwrap_or_default().split('`').skip(1).step_by(2) {
            rooms.push(Room { folder: folder.to_owned(), table, line: i + 1 });
        }
    }
    rooms
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::found;

    const MAP_TEXT: &str = "# Map\n## Rooms\n| Room | Job |\n|---|---|\n| `top` | a |\n\
        | `left` `right` | b |\n| `low` | c |\n\nAround:\n\n| `far` | d |\n## Else\n| `no` | d |\n";

    fn package(name: &str, dependencies: &str) -> String {
        format!("[package]\nname = '{name}'\n{dependencies}")
    }

    fn found_with(left: &str, low: &str) -> Vec<String> {
        found(
            NAME,
            &[
                ("ARCHITECTURE.md", MAP_TEXT),
                ("top/Cargo.toml", &package("top", "[dependencies]\nlow = { path = '../low' }")),
                ("left/Cargo.toml", &package("left", left)),
                ("right/Cargo.toml", &package("right", "")),
                ("low/Cargo.toml", &package("low", low)),
                ("far/Cargo.toml", &package("far", "[dependencies]\ntop = { path = '../top' }")),
            ],
        )
    }

    #[test]
    fn arrows_down_and_those_of_tests_are_right() {
        let seen = found_with("", "[dev-dependencies]\ntop = { path = '../top' }");
        assert!(seen.is_empty(), "{seen:?}");
    }

    #[test]
    fn arrows_up_and_to_neighbours_are_found() {
        let seen = found_with(
            "[dependencies]\nright = { path = '../right' }",
            "[dependencies]\nfar = { path = '../far' }\ntop = { path = '../top' }",
        );
        assert_eq!(
            seen,
            [
                "left/Cargo.toml:4: `left` imports `right`, which is not below it in ARCHITECTURE.md",
                "low/Cargo.toml:4: `low` imports `far`, which is not below it in ARCHITECTURE.md",
                "low/Cargo.toml:5: `low` imports `top`, which is not below it in ARCHITECTURE.md",
            ]
        );
    }

    #[test]
    fn table_and_tree_have_the_same_rooms() {
        let seen = found(
            NAME,
            &[
                ("ARCHITECTURE.md", "## Rooms\n| `gone` | a |\n"),
                ("here/Cargo.toml", &package("here", "")),
            ],
        );
        assert_eq!(
            seen,
            [
                "ARCHITECTURE.md:2: room `gone` is no folder",
                "here/Cargo.toml:1: package `here` is in no room of ARCHITECTURE.md",
            ]
        );
    }
}

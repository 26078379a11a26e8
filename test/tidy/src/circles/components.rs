//! Strongly connected components of the graph of files.

use std::collections::BTreeMap;

use super::Arrows;

/// Groups of two or more files that reach each other, each sorted.
pub fn find(arrows: &Arrows) -> Vec<Vec<String>> {
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    for (from, to) in arrows.keys() {
        for name in [from, to] {
            let next = numbers.len();
            numbers.entry(name).or_insert(next);
        }
    }
    let mut next = vec![Vec::new(); numbers.len()];
    for (from, to) in arrows.keys() {
        next[numbers[from.as_str()]].push(numbers[to.as_str()]);
    }
    let mut names = vec![""; numbers.len()];
    for (name, number) in &numbers {
        names[*number] = name;
    }
    let mut search = Search::new(&next);
    for node in 0..next.len() {
        if search.order[node].is_none() {
            search.visit(node);
        }
    }
    let named = |group: Vec<usize>| {
        let mut files: Vec<String> = group.into_iter().map(|n| names[n].to_owned()).collect();
        files.sort();
        files
    };
    search.groups.into_iter().filter(|g| g.len() > 1).map(named).collect()
}

/// Tarjan's search. It recurses: a crate has at most some hundred files.
struct Search<'a> {
    next: &'a [Vec<usize>],
    order: Vec<Option<usize>>,
    low: Vec<usize>,
    is_open: Vec<bool>,
    open: Vec<usize>,
    count: usize,
    groups: Vec<Vec<usize>>,
}

impl<'a> Search<'a> {
    fn new(next: &'a [Vec<usize>]) -> Search<'a> {
        let len = next.len();
        Search {
            next,
            order: vec![None; len],
            low: vec![0; len],
            is_open: vec![false; len],
            open: Vec::new(),
            count: 0,
            groups: Vec::new(),
        }
    }

    fn visit(&mut self, node: usize) {
        self.order[node] = Some(self.count);
        self.low[node] = self.count;
        self.count += 1;
        self.open.push(node);
        self.is_open[node] = true;
        for &to in &self.next[node] {
            match self.order[to] {
                None => {
                    self.visit(to);
                    self.low[node] = self.low[node].min(self.low[to]);
                }
                Some(order) if self.is_open[to] => self.low[node] = self.low[node].min(order),
                Some(_) => {}
            }
        }
        if self.order[node] != Some(self.low[node]) {
            return;
        }
        let mut group = Vec::new();
        while let Some(member) = self.open.pop() {
            self.is_open[member] = false;
            group.push(member);
            if member == node {
                break;
            }
        }
        self.groups.push(group);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(pairs: &[(&str, &str)]) -> Vec<Vec<String>> {
        let arrow =
            |(a, b): &(&str, &str)| (((*a).to_owned(), (*b).to_owned()), Default::default());
        let mut groups = find(&pairs.iter().map(arrow).collect());
        groups.sort();
        groups
    }

    #[test]
    fn two_circles_with_a_bridge_are_two_groups() {
        let pairs = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "c")];
        assert_eq!(groups(&pairs), [vec!["a", "b"], vec!["c", "d", "e"]]);
    }

    #[test]
    fn a_tree_has_none() {
        assert!(groups(&[("a", "b"), ("a", "c"), ("b", "c")]).is_empty());
    }
}

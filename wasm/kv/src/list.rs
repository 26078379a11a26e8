//! Queues of slots: each slot knows its neighbours, so that any can leave.

/// No slot.
pub(crate) const NONE: u32 = u32::MAX;

/// A slot's neighbours: towards the head, who leaves first, and towards the tail.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Links {
    ahead: u32,
    behind: u32,
}

impl Default for Links {
    fn default() -> Self {
        Self { ahead: NONE, behind: NONE }
    }
}

/// Access to the links of slots.
pub(crate) trait Linked {
    fn links(&mut self, slot: u32) -> &mut Links;
}

/// A queue.
#[derive(Debug)]
pub(crate) struct List {
    head: u32,
    tail: u32,
    /// Number of slots in the list.
    pub len: usize,
    /// Bytes of those in it.
    pub bytes: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { head: NONE, tail: NONE, len: 0, bytes: 0 }
    }
}

impl List {
    /// Slot that leaves first.
    pub fn head(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    /// Comes in at the tail.
    pub fn push(&mut self, slots: &mut impl Linked, slot: u32, bytes: usize) {
        *slots.links(slot) = Links { ahead: self.tail, behind: NONE };
        match self.tail {
            NONE => self.head = slot,
            tail => slots.links(tail).behind = slot,
        }
        self.tail = slot;
        self.len += 1;
        self.bytes += bytes;
    }

    /// Leaves.
    pub fn remove(&mut self, slots: &mut impl Linked, slot: u32, bytes: usize) {
        let Links { ahead, behind } = core::mem::take(slots.links(slot));
        match ahead {
            NONE => self.head = behind,
            ahead => slots.links(ahead).behind = behind,
        }
        match behind {
            NONE => self.tail = ahead,
            behind => slots.links(behind).ahead = ahead,
        }
        self.len -= 1;
        self.bytes -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Linked for Vec<Links> {
        fn links(&mut self, slot: u32) -> &mut Links {
            &mut self[slot as usize]
        }
    }

    fn order(list: &List, slots: &[Links]) -> Vec<u32> {
        let step = |&at: &u32| Some(slots[at as usize].behind).filter(|&n| n != NONE);
        std::iter::successors(list.head(), step).collect()
    }

    #[test]
    fn any_slot_can_leave() {
        for gone in 0..4 {
            let (mut list, mut slots) = (List::default(), vec![Links::default(); 5]);
            (0..4).for_each(|n| list.push(&mut slots, n, 10));
            list.remove(&mut slots, gone, 10);
            list.push(&mut slots, 4, 5);
            let left: Vec<_> = (0..5).filter(|&n| n != gone).collect();
            assert_eq!((order(&list, &slots), list.len, list.bytes), (left.clone(), 4, 35));
            left.iter().for_each(|&n| list.remove(&mut slots, n, if n == 4 { 5 } else { 10 }));
            assert_eq!((list.head(), list.len, list.bytes), (None, 0, 0));
        }
    }
}

//! Table of connections whose ids are never reused, and lists through it.

/// Id of an entry of a [`Slab`]; an old id never reaches a later entry (until 2^30 reuses).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SlabId {
    pub index: u32,
    age: u32,
}

const AGE_MASK: u32 = (1 << 30) - 1;

/// Subject of an epoll event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EpollTag {
    Listener(SlabId),
    Handshake(SlabId),
    Endpoint(SlabId),
}

impl EpollTag {
    pub fn to_u64(self) -> u64 {
        let (tag, id) = match self {
            Self::Listener(id) => (0u64, id),
            Self::Handshake(id) => (1, id),
            Self::Endpoint(id) => (2, id),
        };
        tag << 62 | u64::from(id.age) << 32 | u64::from(id.index)
    }

    pub fn from_u64(data: u64) -> Self {
        let id = SlabId { index: data as u32, age: (data >> 32) as u32 & AGE_MASK };
        match data >> 62 {
            0 => Self::Listener(id),
            1 => Self::Handshake(id),
            _ => Self::Endpoint(id),
        }
    }
}

#[derive(Debug)]
struct Slot<T> {
    age: u32,
    value: Option<T>,
}

/// Table of entries with stable ids. Grows when an entry is added to a full table, never otherwise.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    len: usize,
}

impl<T> Slab<T> {
    pub fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), len: 0 }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Number of slots, used or not: indices for [`Slab::id_at`] are below.
    pub fn slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Id of the entry in a slot.
    pub fn id_at(&self, index: u32) -> Option<SlabId> {
        let slot = self.slots.get(index as usize)?;
        slot.value.as_ref().map(|_| SlabId { index, age: slot.age })
    }

    pub fn insert(&mut self, value: T) -> SlabId {
        self.len += 1;
        if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            slot.value = Some(value);
            return SlabId { index, age: slot.age };
        }
        self.slots.push(Slot { age: 0, value: Some(value) });
        // Freeing must never allocate.
        self.free.reserve(self.slots.len());
        SlabId { index: self.slots.len() as u32 - 1, age: 0 }
    }

    pub fn get(&self, id: SlabId) -> Option<&T> {
        self.slots.get(id.index as usize).filter(|s| s.age == id.age)?.value.as_ref()
    }

    pub fn get_mut(&mut self, id: SlabId) -> Option<&mut T> {
        self.slots.get_mut(id.index as usize).filter(|s| s.age == id.age)?.value.as_mut()
    }

    pub fn remove(&mut self, id: SlabId) -> Option<T> {
        let slot = self.slots.get_mut(id.index as usize).filter(|s| s.age == id.age)?;
        let value = slot.value.take()?;
        slot.age = (slot.age + 1) & AGE_MASK;
        self.free.push(id.index);
        self.len -= 1;
        Some(value)
    }
}

/// Links of an entry in a [`ReadyList`].
#[derive(Debug, Default)]
pub(crate) struct Links {
    queued: bool,
    prev: Option<SlabId>,
    next: Option<SlabId>,
}

/// Entry that can be in a [`ReadyList`].
pub(crate) trait Linked {
    fn links(&mut self) -> &mut Links;
}

/// First-in first-out list through the entries of a slab: an entry is in it at most once and can
/// leave from the middle, so that its length is bounded by the table and not by what guests do.
#[derive(Debug, Default)]
pub(crate) struct ReadyList {
    head: Option<SlabId>,
    tail: Option<SlabId>,
}

impl ReadyList {
    pub fn is_empty(&self) -> bool {
        self.head.is_none()
    }

    /// Adds an entry at the end, unless it is in the list.
    pub fn push_back<T: Linked>(&mut self, slab: &mut Slab<T>, id: SlabId) {
        let tail = self.tail;
        let Some(links) = slab.get_mut(id).map(T::links) else { return };
        if links.queued {
            return;
        }
        *links = Links { queued: true, prev: tail, next: None };
        match tail.and_then(|t| slab.get_mut(t)) {
            Some(last) => last.links().next = Some(id),
            None => self.head = Some(id),
        }
        self.tail = Some(id);
    }

    /// Adds an entry at the start, unless it is in the list.
    pub fn push_front<T: Linked>(&mut self, slab: &mut Slab<T>, id: SlabId) {
        let head = self.head;
        let Some(links) = slab.get_mut(id).map(T::links) else { return };
        if links.queued {
            return;
        }
        *links = Links { queued: true, prev: None, next: head };
        match head.and_then(|h| slab.get_mut(h)) {
            Some(first) => first.links().prev = Some(id),
            None => self.tail = Some(id),
        }
        self.head = Some(id);
    }

    pub fn pop_front<T: Linked>(&mut self, slab: &mut Slab<T>) -> Option<SlabId> {
        let id = self.head?;
        self.remove(slab, id);
        Some(id)
    }

    /// Takes an entry out, if it is in the list.
    pub fn remove<T: Linked>(&mut self, slab: &mut Slab<T>, id: SlabId) {
        let Some(links) = slab.get_mut(id).map(T::links) else { return };
        if !links.queued {
            return;
        }
        let Links { prev, next, .. } = std::mem::take(links);
        match prev.and_then(|p| slab.get_mut(p)) {
            Some(p) => p.links().next = next,
            None => self.head = next,
        }
        match next.and_then(|n| slab.get_mut(n)) {
            Some(n) => n.links().prev = prev,
            None => self.tail = prev,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Item(Links);

    impl Linked for Item {
        fn links(&mut self) -> &mut Links {
            &mut self.0
        }
    }

    #[test]
    fn a_late_name_reaches_nobody() {
        let mut slab = Slab::new();
        let old = slab.insert(1);
        assert_eq!(slab.remove(old), Some(1));
        let new = slab.insert(2);
        assert_eq!(new.index, old.index);
        assert_eq!(slab.get(old), None);
        assert_eq!(slab.remove(old), None);
        assert_eq!(slab.get(new), Some(&2));
        assert_eq!(slab.len(), 1);
    }

    #[test]
    fn tags_survive_the_kernel() {
        let id = SlabId { index: u32::MAX, age: AGE_MASK };
        for tag in [EpollTag::Listener(id), EpollTag::Handshake(id), EpollTag::Endpoint(id)] {
            assert_eq!(EpollTag::from_u64(tag.to_u64()), tag);
        }
    }

    #[test]
    fn the_list_keeps_order_and_lets_go_of_the_middle() {
        let mut slab = Slab::new();
        let mut list = ReadyList::default();
        let ids: Vec<SlabId> = (0..4).map(|_| slab.insert(Item::default())).collect();
        for &id in &ids[..3] {
            list.push_back(&mut slab, id);
            list.push_back(&mut slab, id);
        }
        list.push_front(&mut slab, ids[3]);
        list.remove(&mut slab, ids[1]);
        list.remove(&mut slab, ids[1]);
        let order: Vec<SlabId> = std::iter::from_fn(|| list.pop_front(&mut slab)).collect();
        assert_eq!(order, [ids[3], ids[0], ids[2]]);
        assert!(list.is_empty());
        list.push_back(&mut slab, ids[1]);
        assert_eq!(list.pop_front(&mut slab), Some(ids[1]));
    }
}

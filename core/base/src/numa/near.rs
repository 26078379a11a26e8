//! Memory that is made for another thread.

use std::marker::PhantomData;

use super::kernel::Policy;
use super::{Node, Nodes};

/// Memory policy of the calling thread while it lives: pages that the thread touches first come
/// from one node, if that has some free.
#[derive(Debug)]
pub struct NodePreference {
    was: Option<Policy>,
    /// Marker that makes this not `Send`: the policy is that of the thread that made it.
    _here: PhantomData<*const ()>,
}

/// Has the calling thread take new memory from `node`, for a thread that runs there. Does nothing
/// when the node is unknown or the only one. It works on pages that are new to the process: what
/// the allocator has at hand is where it is.
pub fn prefer_node(node: Option<Node>) -> NodePreference {
    prefer_node_of(Nodes::of_machine(), node)
}

fn prefer_node_of(nodes: &Nodes, node: Option<Node>) -> NodePreference {
    let wanted = node.filter(|_| !nodes.is_one()).and_then(Policy::preferred);
    let was = wanted.and_then(|wanted| {
        let was = Policy::of_thread()?;
        wanted.apply().ok().map(|()| was)
    });
    NodePreference { was, _here: PhantomData }
}

impl Drop for NodePreference {
    fn drop(&mut self) {
        if let Some(Err(e)) = self.was.map(|was| was.apply()) {
            // It was the thread's before; whatever refuses it now costs speed only.
            tracing::debug!("set_mempolicy: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Fake;
    use super::*;

    #[test]
    fn a_thread_gets_its_policy_back() {
        let Some(before) = Policy::of_thread() else { return };
        // Node 0 is there on every machine.
        let two = Fake::new("near", &[("node0", "0"), ("node1", "1")]).nodes();
        {
            let _near = prefer_node_of(&two, Some(0));
            assert_eq!(Policy::of_thread().and_then(|now| now.only_node()), Some(0));
        }
        assert_eq!(Policy::of_thread(), Some(before));
        for node in [None, Some(1023), Some(1024), Some(u32::MAX)] {
            drop(prefer_node_of(&two, node));
            assert_eq!(Policy::of_thread(), Some(before));
        }
    }

    #[test]
    fn one_node_is_left_alone() {
        let one = Fake::new("near-one", &[("node0", "0-1")]).nodes();
        assert!(prefer_node_of(&one, Some(0)).was.is_none());
    }
}

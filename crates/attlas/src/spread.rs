//! Running a method when the keys of one sequence lie on several processes.
//!
//! Attention over disjoint sets of keys merges exactly by log-sum-exp, and the state of a linear method is a sum. A
//! method therefore needs no code of its own to run on more than one machine: its entry names a schedule, and the crate
//! `attlas-mpi`, which moves the bytes, does the rest.

use serde::Serialize;

/// The schedule that a method claims for keys on several processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "schedule")]
pub enum Spread {
    /// Keys and values travel round a ring. Each process attends with its own queries to one block of keys at a time
    /// and merges the parts by log-sum-exp.
    Ring {
        /// Parameters that give the number of first and of last keys that a row sees, if a row's keys follow from its
        /// position: only those keys are kept from each passing block.
        #[serde(skip_serializing_if = "Option::is_none")]
        window: Option<(&'static str, &'static str)>,
        /// Parameters that count the keys a row selects among many. Blocks share each count in proportion to the number
        /// of their keys, so a row reads no more than on one process.
        #[serde(skip_serializing_if = "<[_]>::is_empty")]
        shared: &'static [&'static str],
    },
    /// The state is a sum over keys. Processes exchange sums, whose size does not depend on the number of tokens:
    /// [`Stream::sums`](crate::Stream::sums).
    Scan {
        /// Parameter that gives the number of tokens in a block whose rows see each other exactly: no block may lie on
        /// two processes.
        #[serde(skip_serializing_if = "Option::is_none")]
        block: Option<&'static str>,
    },
    /// A few weighted keys represent many. Processes gather those of all others:
    /// [`Plan::stand_ins`](crate::Plan::stand_ins).
    Gather,
    /// None of these.
    Refused {
        /// The reason.
        reason: &'static str,
    },
}

impl Spread {
    /// [`Spread::Ring`] for methods that accept any block of keys.
    pub const RING: Self = Self::Ring { window: None, shared: &[] };

    /// [`Spread::Scan`] without blocks.
    pub const SCAN: Self = Self::Scan { block: None };

    /// Reason of methods that rank all keys of a row.
    pub const RANKS_KEYS: Self =
        Self::Refused { reason: "a row chooses among all of its keys, and one process ranks its own alone" };

    /// Reason of methods that learn from all queries and keys of a sequence.
    pub const SEES_ALL: Self =
        Self::Refused { reason: "what it does with a key depends on all queries and keys of the sequence" };

    /// Returns the schedule's name, if there is a schedule.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::Ring { .. } => Some("ring"),
            Self::Scan { .. } => Some("scan"),
            Self::Gather => Some("gather"),
            Self::Refused { .. } => None,
        }
    }
}

/// Numbers in single or double precision, as processes exchange them.
#[derive(Clone, Debug, PartialEq)]
pub enum Numbers {
    /// Single precision.
    F32(Vec<f32>),
    /// Double precision.
    F64(Vec<f64>),
}

impl Numbers {
    /// Returns the number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F64(x) => x.len(),
        }
    }

    /// Returns true if there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Splits a logarithm into two numbers of any precision that together keep its digits.
pub(crate) fn split_log<T: crate::Real>(log: f64) -> [T; 2] {
    let high = T::from_f64(log);
    let low = if log.is_finite() { T::from_f64(log - high.to_f64()) } else { T::ZERO };
    [high, low]
}

/// Joins the two numbers of [`split_log`] again.
pub(crate) fn join_log<T: crate::Real>([high, low]: [T; 2]) -> f64 {
    high.to_f64() + low.to_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_keep_their_digits_in_single_precision() {
        for log in [0.0, -745.123456789012, 3.7e-5, 1e9 / 3.0] {
            let back = join_log(split_log::<f32>(log));
            assert!((back - log).abs() <= 1e-13 * log.abs(), "{log}: {back}");
            assert_eq!(join_log(split_log::<f64>(log)), log);
        }
        assert_eq!(join_log(split_log::<f32>(f64::NEG_INFINITY)), f64::NEG_INFINITY);
    }

    #[test]
    fn schedules_are_serialised_with_what_they_need() {
        let json = |s: Spread| serde_json::to_string(&s).unwrap();
        assert_eq!(json(Spread::RING), r#"{"schedule":"ring"}"#);
        let window = Spread::Ring { window: Some(("sinks", "window")), shared: &[] };
        assert_eq!(json(window), r#"{"schedule":"ring","window":["sinks","window"]}"#);
        assert_eq!(json(Spread::Scan { block: Some("block") }), r#"{"schedule":"scan","block":"block"}"#);
        assert!(json(Spread::RANKS_KEYS).contains("reason") && Spread::RANKS_KEYS.name().is_none());
    }
}

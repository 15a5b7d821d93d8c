//! The contract of a method: its claims, its plans and its streams.

use crate::engine::SortedRule;
use crate::gradient::Backward;
use crate::group::{GroupPlan, boxed, no_gradient};
use crate::negated::Negated;
use crate::params::{ParamSet, ParamSpec};
use crate::problem::Dims;
use crate::spread::{Numbers, Spread};
use crate::{Error, Inputs, Near, Options, Out, Output, Problem, Qkv, Result, Workspace};
use crate::{Tensor, TensorMut, TensorRef};
use attlas_num::rng::StreamKey;
use attlas_num::{DType, Mat, Real};
use std::collections::BTreeMap;
use std::fmt::Debug;

/// Families of the survey.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Exact attention and the baselines derived from it.
    Exact,
    /// Hashing, clustering and importance sampling.
    Clustering,
    /// Projections, landmarks and coresets.
    LowRank,
    /// Feature maps, sketches and linear attention.
    Kernel,
}

impl Family {
    /// All families, in the order of the survey.
    pub const ALL: [Family; 4] = [Family::Exact, Family::Clustering, Family::LowRank, Family::Kernel];

    /// Returns the name used on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Family::Exact => "exact",
            Family::Clustering => "clustering",
            Family::LowRank => "low_rank",
            Family::Kernel => "kernel",
        }
    }
}

/// A method: its registry entry.
#[derive(Debug)]
pub struct Method {
    /// Name in the literature, `snake_case`; public API.
    pub id: &'static str,
    /// Its family in the survey.
    pub family: Family,
    /// One-line title for people.
    pub title: &'static str,
    /// Authors and year, or the section of the survey.
    pub reference: &'static str,
    /// Its promises, which the shared checks try to refute.
    pub claims: Claims,
    /// Its parameters.
    pub params: &'static [ParamSpec],
    /// Settings under which even a problem of a hundred tokens takes the approximate path; the shared checks run them
    /// beside the defaults.
    pub probes: &'static [&'static [Setting]],
    /// Settings under which it computes the softmax over a subset of the keys: no row's log-sum-exp exceeds the exact
    /// one, and the error is at most the missing mass times the range of the values.
    pub subsets: &'static [&'static [Setting]],
    /// Parameter that sets the length below which it computes exact attention under some mask, if there is one.
    pub exact_below: Option<&'static str>,
    /// Parameters that a tuner may move, and the values worth trying.
    pub tunable: &'static [Tunable],
    /// Returns the reasons why it cannot solve a problem with these options, none if it can. Unreadable options are
    /// such a reason.
    pub supports: fn(&Problem, &Options) -> Support,
    /// Learns a calibration from data, if the method can.
    pub calibrate: Option<Calibrate>,
    /// Reads the options, checks everything and makes a plan: [`Spec::plan_with`] of the typed parameters.
    pub build: Build,
}

/// A parameter and its value, as written in options.
pub type Setting = (&'static str, &'static str);

/// A parameter that a tuner may move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Tunable {
    /// Its name.
    pub param: &'static str,
    /// The values worth trying.
    pub ladder: Ladder,
}

/// Values of a parameter that are worth trying.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ladder {
    /// A budget: whole numbers up to the number of keys. A larger one is more accurate and takes longer. All budgets of
    /// a method move together.
    UpToKeys,
    /// These values and the default, each with every budget.
    Values(&'static [&'static str]),
}

impl Tunable {
    /// Makes a budget.
    pub const fn budget(param: &'static str) -> Self {
        Self { param, ladder: Ladder::UpToKeys }
    }

    /// Makes a choice among these values and the default.
    pub const fn values(param: &'static str, values: &'static [&'static str]) -> Self {
        Self { param, ladder: Ladder::Values(values) }
    }
}

/// Makes a plan from a problem, options and an optional calibration.
pub type Build = fn(&Problem, &Options, Option<&Calibration>) -> Result<Box<dyn Plan>>;

/// Learns a calibration from sample inputs of the problem's heads and widths.
pub type Calibrate = fn(&Problem, &Options, &[Inputs<'_>]) -> Result<Calibration>;

/// Learns a calibration from typed parameters and sample inputs.
pub type Learn<S> = fn(&S, &Problem, &[Inputs<'_>]) -> Result<Calibration>;

impl Method {
    /// Returns the registry entry of the method typed by `S`, filled with what follows from the type: parameters,
    /// support, calibration and plans. An entry names the other fields and ends in `..Method::of::<Params>()`.
    pub const fn of<S: Spec>() -> Method {
        Method {
            id: "",
            family: Family::Exact,
            title: "",
            reference: "",
            claims: Claims::BASE,
            params: S::SPECS,
            probes: &[],
            subsets: &[],
            exact_below: None,
            tunable: &[],
            supports: |problem, options| match S::from_options(options) {
                Ok(params) => params.supports(problem),
                Err(error) => Support::unless(true, error.to_string()),
            },
            calibrate: match S::CALIBRATE {
                Some(_) => Some(|problem, options, samples| match S::CALIBRATE {
                    // What is learnt does not depend on the near field.
                    Some(learn) => {
                        let (_, own) = Near::split(Near::NONE, options, S::SPECS)?;
                        learn(&S::from_options(&own)?, problem, samples)
                    }
                    None => unreachable!("matched above"),
                }),
                None => None,
            },
            build: |problem, options, calibration| S::from_options(options)?.plan_with(problem, calibration),
        }
    }

    /// Plans `problem`, or returns every reason against it.
    pub fn plan(&self, problem: &Problem, options: &Options) -> Result<Box<dyn Plan>> {
        self.plan_with(problem, options, None)
    }

    /// Plans `problem` with an optional calibration, or returns every reason against it.
    pub fn plan_with(
        &self,
        problem: &Problem,
        options: &Options,
        calibration: Option<&Calibration>,
    ) -> Result<Box<dyn Plan>> {
        let (near, options) = &Near::split(problem.near, options, self.params)?;
        let problem = &problem.with_near(*near);
        (self.build)(problem, options, calibration)
    }
}

/// A method typed by its parameters. The registry reads them from [`Options`] and then takes the same path:
///
/// ```
/// use attlas::methods::low_rank::nystromformer::Params;
/// use attlas::{Problem, method::Spec};
///
/// let params = Params { landmarks: 32, ..Params::default() };
/// assert!(params.clone().plan(&Problem::new(2, 256, 16)).is_ok());
/// assert!(params.plan(&Problem::new(2, 256, 16).causal()).is_err());
/// ```
pub trait Spec: ParamSet {
    /// The registry entry.
    const METHOD: &'static Method;

    /// Learns from sample inputs of the problem's heads and widths, if the method can.
    const CALIBRATE: Option<Learn<Self>> = None;

    /// Returns the reasons why the method cannot solve `problem` with these parameters, none if it can.
    fn supports(&self, problem: &Problem) -> Support {
        let _ = problem;
        Support::yes()
    }

    /// Makes the plan of an accepted problem and checks rules between parameters.
    fn build(self, accepted: Accepted<'_>) -> Result<impl GroupPlan>;

    /// Checks everything and plans `problem`, or returns every reason against it.
    fn plan(self, problem: &Problem) -> Result<Box<dyn Plan>> {
        self.plan_with(problem, None)
    }

    /// Checks everything and plans `problem` with an optional calibration.
    fn plan_with(self, problem: &Problem, calibration: Option<&Calibration>) -> Result<Box<dyn Plan>> {
        let method = Self::METHOD;
        problem.validate()?;
        self.validate()?;
        if problem.scale < 0.0 && method.claims_with(&self.to_options()).softmax {
            let positive = Problem { scale: -problem.scale, ..*problem };
            return Ok(Box::new(Negated::new(self.plan_with(&positive, calibration)?, problem)));
        }
        let problem = &problem.with_near(problem.near.resolved(&method.claims));
        method.accept(problem, self.supports(problem), calibration)?;
        let plan = self.clone().build(Accepted { problem, calibration })?;
        Ok(boxed(self, plan, problem))
    }
}

/// A problem that a method accepts. Only [`Spec::plan_with`] makes one, so a refused problem is never planned.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Accepted<'a> {
    /// The problem.
    pub problem: &'a Problem,
    /// The calibration, if any; made for this method, its heads and widths.
    pub calibration: Option<&'a Calibration>,
}

impl Method {
    /// Returns the reasons why the method cannot solve a problem with these options, near field included.
    pub fn support(&self, problem: &Problem, options: &Options) -> Support {
        match Near::split(problem.near, options, self.params) {
            Ok((near, options)) => {
                let problem = problem.with_near(near);
                let mut support = (self.supports)(&problem, &options);
                support.reasons.extend(near.reasons(self, &problem));
                support.reasons.extend(self.softcap_reason(&problem));
                support
            }
            Err(error) => Support::unless(true, error.to_string()),
        }
    }

    /// Returns an error unless an option of that name exists, of the method itself or of its near field.
    pub fn check_option(&self, name: &str, value: impl Into<crate::params::Value>) -> Result<()> {
        let (_, own) = Near::split(Near::NONE, &Options::new().with(name, value), self.params)?;
        match own.is_empty() || self.params.iter().any(|p| p.name == name) {
            true => Ok(()),
            false => Err(Error::UnknownParam {
                name: format!("{name} of {}", self.id),
                accepted: self.params.iter().map(|p| p.name.to_string()).collect(),
            }),
        }
    }

    /// Returns an error with every reason against a plan, `support` included.
    fn accept(&self, problem: &Problem, support: Support, calibration: Option<&Calibration>) -> Result<()> {
        let mut reasons = support.reasons;
        reasons.extend(problem.near.reasons(self, problem));
        reasons.extend(self.softcap_reason(problem));
        if self.claims.needs == Needs::Calibration && calibration.is_none() {
            reasons.push(format!("{} learns from data first: pass a calibration", self.id));
        }
        if !reasons.is_empty() {
            return Err(Error::Unsupported { method: self.id.into(), reasons });
        }
        calibration.map_or(Ok(()), |c| c.check(self.id, problem))
    }

    /// Returns why the method cannot honour the problem's softcap, if it cannot.
    fn softcap_reason(&self, problem: &Problem) -> Option<String> {
        let cap = problem.softcap?;
        if !self.claims.softcap {
            return Some(format!(
                "logits are capped at {cap}, and its weights are not those of capped logits"
            ));
        }
        let near = !problem.near.is_none();
        near.then(|| format!("logits are capped at {cap}, which a near field does not do"))
    }

    /// Returns the method's promises with these options, except laws: see [`keeps_with`](Self::keeps_with).
    pub fn claims_with(&self, options: &Options) -> Claims {
        let mut claims = self.claims;
        for promise in self.withdrawn(options) {
            match promise {
                Promise::RowStochastic => claims.row_stochastic = false,
                Promise::Unbiased => claims.unbiased = false,
                Promise::Softmax => claims.softmax = false,
                Promise::ExactAt => claims.exact_at = &[],
                Promise::Gradient => claims.gradient = false,
                Promise::Law(_) => {}
            }
        }
        claims
    }

    /// Returns true if `law` is promised with these options.
    pub fn keeps_with(&self, options: &Options, law: Law) -> bool {
        let near = Near::split(Near::NONE, options, self.params).map_or(Near::NONE, |(near, _)| near);
        self.claims.keeps(law) && near.keeps(law) && !self.withdrawn(options).any(|p| p == Promise::Law(law))
    }

    fn withdrawn(&self, options: &Options) -> impl Iterator<Item = Promise> {
        let holds = |w: &Withdrawn| {
            let spec = self.params.iter().find(|p| p.name == w.param);
            let default = spec.map(|p| (p.default)().to_string());
            let value = options.get(w.param).map(|v| v.to_string()).or_else(|| default.clone());
            value.is_some_and(|value| w.applies(&value, default.as_deref()))
        };
        self.claims.withdrawn.iter().filter(move |w| holds(w)).map(|w| w.promise)
    }
}

/// A planned problem: every decision that needs no data is made.
///
/// The planned numbers of queries and keys are capacities: [`execute`](Self::execute) also takes fewer, so one plan
/// serves a growing cache. Decisions that depend on the length use the planned length.
pub trait Plan: Debug + Send + Sync {
    /// Returns the planned problem.
    fn problem(&self) -> &Problem;

    /// Returns the counted work, set-up included.
    fn cost(&self) -> Cost;

    /// Measures the peak scratch memory in bytes, by a run on Gaussian inputs of the planned size, without padding. It
    /// takes as long as any other run and is a measurement, not a bound: where buffers follow the data (lists of chosen
    /// keys, recomputed rows), other inputs take more or less. The buffers stay in `ws`, so the next run allocates
    /// none.
    fn workspace_bytes(&self, dtype: DType, ws: &mut Workspace) -> Result<usize> {
        match dtype {
            DType::F32 => count_scratch::<f32>(self.problem(), ws, &|x, out, ws| self.execute(x, out, ws)),
            DType::F64 => count_scratch::<f64>(self.problem(), ws, &|x, out, ws| self.execute(x, out, ws)),
        }
    }

    /// Computes the output, and the log-sum-exp if the output has room for it. Nothing is written when an error is
    /// returned. NaN and infinities in the inputs of one key head do not affect the others. Rows that see them are NaN;
    /// where a method then has no answer at all, all rows of that key head are NaN, or, under a causal mask, the call
    /// returns an error.
    fn execute(&self, inputs: &Inputs<'_>, out: &mut Output<'_>, ws: &mut Workspace) -> Result<RunInfo>;

    /// Computes the gradients of queries, keys and values from the gradient with respect to the results of a run.
    /// Methods that do not claim [`gradient`](Claims::gradient) refuse. Nothing is written when an error is returned.
    fn backward(&self, pass: &mut Backward<'_>, ws: &mut Workspace) -> Result<()> {
        let _ = (pass, ws);
        Err(no_gradient())
    }

    /// Makes an empty stream for token-by-token decoding, if the method can decode.
    fn stream(&self, dtype: DType) -> Option<Box<dyn Stream>> {
        let _ = dtype;
        None
    }

    /// Returns how it sorts and cuts queries and keys, if it only attends block by block over sorted rows.
    fn sorted_rule(&self) -> Option<SortedRule<'_>> {
        None
    }

    /// Returns a few weighted keys that represent the keys `[batch, n_kv_heads, t, d]` and values of one piece of a
    /// sequence: one list for each sequence and key head, if the method makes them ([`Spread::Gather`]). `piece`
    /// selects the random streams.
    fn stand_ins(
        &self,
        k: Tensor<'_>,
        v: Tensor<'_>,
        piece: u64,
        ws: &mut Workspace,
    ) -> Result<Option<Vec<Numbers>>> {
        let _ = (k, v, piece, ws);
        Ok(None)
    }

    /// Attends with the queries `[batch, n_heads, n, d]` to the stand-ins of several pieces and to nothing else. All
    /// lists of one sequence and key head are joined.
    fn attend_stand_ins(
        &self,
        q: Tensor<'_>,
        stand_ins: &[Numbers],
        out: &mut Output<'_>,
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let _ = (q, stand_ins, out, ws);
        Err(Error::shape("stand-ins", "a method that gathers", "another one"))
    }
}

/// Measures the peak scratch memory in bytes while `run` works on Gaussian inputs. The output stores the heads of a
/// token side by side and has no log-sum-exp: this layout passes through scratch memory.
fn count_scratch<T: Real>(
    p: &Problem,
    ws: &mut Workspace,
    run: &dyn Fn(&Inputs<'_>, &mut Output<'_>, &mut Workspace) -> Result<RunInfo>,
) -> Result<usize>
where
    for<'a> Qkv<'a, T>: Into<Inputs<'a>>,
    for<'a> Out<'a, T>: Into<Output<'a>>,
{
    let mut rng = StreamKey::new(0).named("count scratch").rng();
    let mut gaussian = |dims: Dims| {
        let mut x = vec![T::ZERO; dims.iter().product()];
        rng.fill_normal(&mut x);
        x
    };
    let dims = |heads, rows, width| [p.batch, heads, rows, width];
    let (of_q, of_k) = (dims(p.n_heads, p.n_q, p.d), dims(p.n_kv_heads, p.n_k, p.d));
    let (of_v, of_o) = (dims(p.n_kv_heads, p.n_k, p.d_v), dims(p.n_heads, p.n_q, p.d_v));
    let (q, k, v) = (gaussian(of_q), gaussian(of_k), gaussian(of_v));
    let x = Qkv::new(TensorRef::bhnd(&q, of_q)?, TensorRef::bhnd(&k, of_k)?, TensorRef::bhnd(&v, of_v)?);
    let mut o = vec![T::ZERO; of_o.iter().product()];
    ws.scratch().reset_peak();
    run(&x.into(), &mut Out::new(TensorMut::bnhd(&mut o, of_o)?).into(), ws)?;
    Ok(ws.scratch().peak_bytes())
}

/// Decoding of one token at a time, causal by construction. Tensors have the element type for which the stream was
/// made.
pub trait Stream: Debug + Send {
    /// Appends the keys `[batch, n_kv_heads, t, d]` and values `[batch, n_kv_heads, t, d_v]` of `t` tokens.
    fn push(&mut self, k: Tensor<'_>, v: Tensor<'_>, ws: &mut Workspace) -> Result<()>;

    /// Attends with the queries `[batch, n_heads, 1, d]` of the last pushed token to everything pushed. For several
    /// tokens at a time, as in speculative decoding, see [`Stream::extend`].
    fn attend(&mut self, q: Tensor<'_>, out: &mut Output<'_>, ws: &mut Workspace) -> Result<RunInfo>;

    /// Appends `t` tokens and attends with each of them to itself and everything before: `t` rows of output. Equals
    /// pushing and attending token by token, and does just that where a method has nothing faster.
    fn extend(&mut self, inputs: &Inputs<'_>, out: &mut Output<'_>, ws: &mut Workspace) -> Result<RunInfo>;

    /// Returns the number of tokens pushed so far.
    fn len(&self) -> usize;

    /// Returns true if no token has been pushed.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the current size of the state in bytes.
    fn state_bytes(&self) -> usize;

    /// Returns the sums that represent everything pushed, if the method keeps nothing else ([`Spread::Scan`]).
    fn sums(&self, ws: &mut Workspace) -> Option<Numbers> {
        let _ = ws;
        None
    }

    /// Adds the sums of another stream of the same plan, which represent `tokens` tokens.
    fn add_sums(&mut self, sums: &Numbers, tokens: usize) -> Result<()> {
        let _ = (sums, tokens);
        Err(Error::shape("sums", "a stream that is a sum over keys", "another one"))
    }

    /// Returns the sums of the keys that the next call of [`rows`](Self::rows) brings, under a causal mask, and keeps
    /// the intermediate results for that call. `None` if `rows` has no use for them: push the keys to a stream for
    /// their sums.
    fn prepare(&mut self, k: Tensor<'_>, v: Tensor<'_>, ws: &mut Workspace) -> Result<Option<Numbers>> {
        let _ = (k, v, ws);
        Ok(None)
    }

    /// Computes rows that see everything pushed and, with `causal`, the keys of `inputs` up to their own. Pushes
    /// nothing.
    fn rows(
        &mut self,
        inputs: &Inputs<'_>,
        causal: bool,
        out: &mut Output<'_>,
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let _ = (inputs, causal, out, ws);
        Err(Error::shape("rows", "a stream that is a sum over keys", "another one"))
    }
}

/// Promises of a method. `BASE` is strict: laws hold unless the entry names an exception with its reason.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Claims {
    /// Has a form for [`Mask::Causal`](crate::Mask::Causal) in which no later token changes a row.
    pub causal: bool,
    /// Plans of a causal problem offer a [`Stream`].
    pub decode: bool,
    /// Plans offer [`Plan::backward`], the exact gradient of what they compute; not with a near field.
    pub gradient: bool,
    /// Parameter settings at which the output is bit-identical to `exact`.
    #[serde(serialize_with = "exact_settings")]
    pub exact_at: &'static [(&'static str, Budget)],
    /// Weights are non-negative and sum to one: constant values are reproduced, outputs stay in their hull.
    pub row_stochastic: bool,
    /// The mean of $e^{\text{lse}}$ over seeds is the exact normaliser.
    pub unbiased: bool,
    /// Draws no random numbers.
    pub deterministic: bool,
    /// Approximates softmax attention, rather than being a model of its own.
    pub softmax: bool,
    /// Gives the log-sum-exp of its unnormalised sums.
    pub lse: bool,
    /// Drops keys without representing their mass; a near field then adds their means.
    pub drops: bool,
    /// Honours [`Problem::softcap`]; other methods refuse it.
    pub softcap: bool,
    /// How it runs when keys lie on several processes.
    pub spread: Spread,
    /// Exponent of the sequence length in the time, as published.
    pub exponent: f64,
    /// Prerequisite for useful results.
    pub needs: Needs,
    /// Slow reference for checks; left out of comparisons unless named.
    pub oracle: bool,
    /// Laws that it breaks, each with the reason.
    #[serde(serialize_with = "exceptions")]
    pub except: &'static [(Law, &'static str)],
    /// Promises that particular settings of a parameter break.
    pub withdrawn: &'static [Withdrawn],
}

/// A promise that is void while a parameter has a certain value.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Withdrawn {
    /// Name of the parameter.
    pub param: &'static str,
    /// Its value, as written in options, or a condition: `> 0` and `< 1` match numbers above and below, `!= word`
    /// matches every other value, `*` every value but the default.
    pub value: &'static str,
    /// The promise that is then void.
    pub promise: Promise,
    /// The reason.
    pub reason: &'static str,
}

impl Withdrawn {
    /// Returns true if the promise is withdrawn while the parameter has `value`.
    pub fn applies(&self, value: &str, default: Option<&str>) -> bool {
        let number = |text: &str| text.trim().parse::<f64>().ok();
        let compare = |bound: &str, holds: fn(f64, f64) -> bool| {
            number(value).zip(number(bound)).is_some_and(|(value, bound)| holds(value, bound))
        };
        if self.value == "*" {
            Some(value) != default
        } else if let Some(other) = self.value.strip_prefix("!=") {
            value != other.trim()
        } else if let Some(bound) = self.value.strip_prefix('>') {
            compare(bound, |value, bound| value > bound)
        } else if let Some(bound) = self.value.strip_prefix('<') {
            compare(bound, |value, bound| value < bound)
        } else {
            value == self.value
        }
    }
}

/// Serialises a list of `{"param", "value"}`, where the value is `num_keys`, `num_tokens` or a number.
fn exact_settings<S: serde::Serializer>(
    list: &&'static [(&'static str, Budget)],
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    #[derive(serde::Serialize)]
    struct At {
        param: &'static str,
        value: Amount,
    }
    #[derive(serde::Serialize)]
    #[serde(untagged)]
    enum Amount {
        Word(&'static str),
        Number(f64),
    }
    let amount = |budget| match budget {
        Budget::NumKeys => Amount::Word("num_keys"),
        Budget::NumTokens => Amount::Word("num_tokens"),
        Budget::Value(x) => Amount::Number(x),
    };
    serializer.collect_seq(list.iter().map(|&(param, budget)| At { param, value: amount(budget) }))
}

/// Serialises a list of `{"law", "reason"}`.
fn exceptions<S: serde::Serializer>(
    list: &&'static [(Law, &'static str)],
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    #[derive(serde::Serialize)]
    struct Exception {
        law: Law,
        reason: &'static str,
    }
    serializer.collect_seq(list.iter().map(|&(law, reason)| Exception { law, reason }))
}

/// Promises that a setting may withdraw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Promise {
    /// [`Claims::row_stochastic`].
    RowStochastic,
    /// [`Claims::unbiased`].
    Unbiased,
    /// [`Claims::softmax`].
    Softmax,
    /// [`Claims::exact_at`], all of it.
    ExactAt,
    /// [`Claims::gradient`].
    Gradient,
    /// A law.
    Law(Law),
}

impl Claims {
    /// The strict default: causal, softmax, deterministic, log-sum-exp, quadratic, every law.
    pub const BASE: Claims = Claims {
        causal: true,
        decode: false,
        gradient: false,
        exact_at: &[],
        row_stochastic: true,
        unbiased: false,
        deterministic: true,
        softmax: true,
        lse: true,
        drops: false,
        softcap: false,
        spread: Spread::SEES_ALL,
        exponent: 2.0,
        needs: Needs::Nothing,
        oracle: false,
        except: &[],
        withdrawn: &[],
    };

    /// Returns true if `law` is promised.
    pub fn keeps(&self, law: Law) -> bool {
        !self.except.iter().any(|(l, _)| *l == law)
    }
}

/// Laws that every method keeps unless its claims name an exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Law {
    /// Outputs are linear in the values.
    LinearInValues,
    /// Without a mask, permuting keys together with values changes nothing but rounding.
    KeyOrder,
    /// Each query head of a group gives the same result as alone with the group's keys.
    HeadsAlone,
    /// A stream gives the rows of the causal plan, up to rounding.
    DecodeIsPrefill,
    /// A row depends on its own query and the keys alone, not on other queries.
    QueriesAlone,
}

/// Prerequisite of a method for useful results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Needs {
    /// None: works on any trained model as it is.
    Nothing,
    /// Must first learn from sample inputs.
    Calibration,
    /// Meant for models trained with it; runs on others with whatever error results.
    Training,
}

/// The value of a parameter at which a method becomes exact.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Budget {
    /// At least the number of keys.
    NumKeys,
    /// At least the larger of the numbers of queries and keys.
    NumTokens,
    /// A fixed real value.
    Value(f64),
}

impl Budget {
    /// Returns the value for a problem.
    pub fn value(self, problem: &Problem) -> crate::params::Value {
        match self {
            Budget::NumKeys => problem.n_k.max(1).into(),
            Budget::NumTokens => problem.n_k.max(problem.n_q).max(1).into(),
            Budget::Value(x) => x.into(),
        }
    }
}

/// Reasons why a method refuses a problem; none if it accepts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Support {
    /// Every reason for refusing.
    pub reasons: Vec<String>,
}

impl Support {
    /// Accepts.
    pub fn yes() -> Self {
        Self::default()
    }

    /// Accepts unless `refused`.
    pub fn unless(refused: bool, reason: impl Into<String>) -> Self {
        Self::yes().and_unless(refused, reason)
    }

    /// Adds `reason` if `refused`.
    #[must_use]
    pub fn and_unless(mut self, refused: bool, reason: impl Into<String>) -> Self {
        if refused {
            self.reasons.push(reason.into());
        }
        self
    }

    /// Returns true if there is no reason to refuse.
    pub fn is_yes(&self) -> bool {
        self.reasons.is_empty()
    }
}

/// Operations and bytes for the whole problem, counted from its sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Cost {
    /// Floating-point operations before the first output row: hashing, clustering, features of keys, ….
    pub setup_flops: u64,
    /// Floating-point operations for the rows; a multiply-add counts as two.
    pub run_flops: u64,
    /// Bytes read and written if every operand came from memory once.
    pub bytes: u64,
}

impl Cost {
    /// Returns the operations of set-up and run together.
    pub fn flops(&self) -> u64 {
        self.setup_flops + self.run_flops
    }
}

/// Record of a run.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct RunInfo {
    /// Inner products of a query with a key, or with a vector that represents keys: a centroid, landmark, sample or
    /// mixed key, a bucket's sum, an entry of a feature state. A key that is scored twice, as when keys are first
    /// ranked by a few coordinates, counts twice; products with random directions of a hash do not count. All methods
    /// count in this unit.
    pub keys_visited: u64,
    /// The same products without queries: keys with centroids, landmarks or pivots, before the first row. With k-means
    /// on queries and keys together, products of its queries count here, too.
    pub setup_scores: u64,
    /// Rows that see no key and are written as zero.
    pub empty_rows: u64,
    /// Rows computed by a fallback, such as exact attention after a vanishing denominator.
    pub fallback_rows: u64,
    /// Largest rank, or number of landmarks or clusters, that was reached.
    pub rank: Option<usize>,
    /// Largest number of steps of an inner iteration.
    pub iterations: Option<usize>,
    /// How the run ended.
    pub status: Status,
    /// Further figures by name, such as predicted errors and residuals; the largest over groups.
    pub figures: BTreeMap<&'static str, f64>,
}

impl RunInfo {
    /// Makes a record of visited pairs alone.
    pub fn visited(keys_visited: u64) -> Self {
        Self { keys_visited, ..Self::default() }
    }

    /// Combines the records of two parts of a run.
    #[must_use]
    pub fn merge(mut self, other: RunInfo) -> RunInfo {
        self.keys_visited += other.keys_visited;
        self.setup_scores += other.setup_scores;
        self.empty_rows += other.empty_rows;
        self.fallback_rows += other.fallback_rows;
        self.rank = self.rank.max(other.rank);
        self.iterations = self.iterations.max(other.iterations);
        self.status = self.status.max(other.status);
        for (name, value) in other.figures {
            let entry = self.figures.entry(name).or_insert(value);
            *entry = entry.max(value);
        }
        self
    }
}

/// How a run ended.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// As planned.
    #[default]
    Complete,
    /// The budget covered everything, and exact attention was computed instead.
    Exact,
    /// An inner iteration stopped before its tolerance; the answer is the best one reached.
    StoppedEarly,
}

/// Parameters learnt from data: plain numbers by name, saved and loaded unchanged.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Calibration {
    /// Id of the method that made it.
    pub method: String,
    /// Key heads it was made for.
    pub n_kv_heads: usize,
    /// Query heads it was made for.
    pub n_heads: usize,
    /// Width of keys it was made for.
    pub d: usize,
    /// Width of values it was made for.
    pub d_v: usize,
    /// Matrices by name, usually one per key head as `name.0`, `name.1`, ….
    pub matrices: BTreeMap<String, Matrix>,
}

/// A matrix as stored in a file.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Matrix {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements, row after row.
    pub data: Vec<f64>,
}

impl Calibration {
    /// Makes an empty calibration for the heads and widths of `problem`.
    pub fn new(method: &str, problem: &Problem) -> Self {
        Self {
            method: method.into(),
            n_kv_heads: problem.n_kv_heads,
            n_heads: problem.n_heads,
            d: problem.d,
            d_v: problem.d_v,
            matrices: BTreeMap::new(),
        }
    }

    /// Stores a matrix under `name`.
    pub fn insert(&mut self, name: String, m: &Mat<f64>) {
        self.matrices.insert(name, Matrix { rows: m.rows(), cols: m.cols(), data: m.data().to_vec() });
    }

    /// Returns the matrix stored under `name`.
    pub fn matrix(&self, name: &str) -> Result<Mat<f64>> {
        let missing = |found: String| Error::Calibration {
            method: self.method.clone(),
            expected: format!("a matrix {name}"),
            found,
        };
        let m = self.matrices.get(name).ok_or_else(|| missing("none of that name".into()))?;
        if m.rows.checked_mul(m.cols) != Some(m.data.len()) {
            return Err(missing(format!("{} elements for {} × {}", m.data.len(), m.rows, m.cols)));
        }
        Ok(Mat::from_vec(m.data.clone(), m.rows, m.cols))
    }

    /// Refuses a calibration that was made for another method or shape.
    pub fn check(&self, method: &str, p: &Problem) -> Result<()> {
        let made_for = (self.method.as_str(), self.n_heads, self.n_kv_heads, self.d, self.d_v);
        let wanted = (method, p.n_heads, p.n_kv_heads, p.d, p.d_v);
        if made_for == wanted {
            return Ok(());
        }
        let words = |(m, h, g, d, dv): (&str, usize, usize, usize, usize)| {
            format!("one made by {m} for {h} query heads, {g} key heads, d = {d}, d_v = {dv}")
        };
        Err(Error::Calibration { method: method.into(), expected: words(wanted), found: words(made_for) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn withdrawn(value: &'static str) -> Withdrawn {
        Withdrawn { param: "c0", value, promise: Promise::ExactAt, reason: "for the test" }
    }

    #[test]
    fn promises_are_withdrawn_by_value_by_comparison_and_off_the_default() {
        let applies = |condition, value| withdrawn(condition).applies(value, Some("0"));
        assert!(applies("> 0", "0.5") && !applies("> 0", "0") && !applies("> 0", "auto"));
        assert!(applies("< 2", "1") && !applies("< 2", "2"));
        assert!(applies("!= keys", "both") && !applies("!= keys", "keys"));
        assert!(applies("*", "1") && !applies("*", "0"));
        assert!(applies("both", "both") && !applies("both", "keys"));
    }

    #[test]
    fn claims_are_serialised_whole() {
        let claims = Claims {
            exact_at: &[("rank", Budget::NumKeys), ("stride", Budget::Value(1.0))],
            except: &[(Law::KeyOrder, "by position")],
            withdrawn: &[Withdrawn {
                param: "c0",
                value: "> 0",
                promise: Promise::RowStochastic,
                reason: "less",
            }],
            ..Claims::BASE
        };
        let json = serde_json::to_value(claims).unwrap();
        assert_eq!(json["exact_at"][0], serde_json::json!({"param": "rank", "value": "num_keys"}));
        assert_eq!(json["exact_at"][1]["value"], 1.0);
        assert_eq!(json["except"][0], serde_json::json!({"law": "key_order", "reason": "by position"}));
        assert_eq!(json["withdrawn"][0]["promise"], "row_stochastic");
        assert_eq!(json["withdrawn"][0]["value"], "> 0");
    }
}

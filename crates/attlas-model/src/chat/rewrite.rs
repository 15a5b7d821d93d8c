//! Rewriting of a template's syntax tree: a check precedes every operation that makes a larger value from smaller ones.
//!
//! The engine counts steps, not bytes, and folds constants at compile time. Therefore operands of `~` and `+`, items of
//! lists and maps, and inputs of filters become calls of [`OPERAND`]; `*` and `%` become calls of our own functions;
//! and text between tags becomes an expression, which lets the formatter count every byte written.

use minijinja::Value;
use minijinja::machinery::ast::{
    BinOp, BinOpKind, Call, CallArg, CallBlock, Compare, CompareOp, Const, Do, EmitExpr, Expr, Filter,
    FilterBlock, ForLoop, GetAttr, GetItem, IfCond, IfExpr, List, Macro, Map, Set, SetBlock, Slice, Spanned,
    Stmt, Template, Test, Tuple, UnaryOp, UnaryOpKind, Var, WithBlock,
};

/// Names that only rewritten templates may use.
pub(super) const RESERVED: &str = "__attlas_";
/// Returns its argument, if it is not too large.
pub(super) const OPERAND: &str = "__attlas_operand";
/// The operator `*`.
pub(super) const MUL: &str = "__attlas_mul";
/// The operator `%`.
pub(super) const REM: &str = "__attlas_rem";
/// Returns its argument, if nothing in it can contain itself.
pub(super) const PLAIN: &str = "__attlas_plain";

/// Adds checks to a statement; fails with the name of a statement that chat templates do not need.
pub(super) fn statement<'a>(s: &Stmt<'a>) -> Result<Stmt<'a>, &'static str> {
    Ok(match s {
        Stmt::Template(t) => Stmt::Template(at(t, Template { children: body(&t.children)? })),
        Stmt::EmitExpr(e) => Stmt::EmitExpr(at(e, EmitExpr { expr: expr(&e.expr) })),
        Stmt::EmitRaw(e) => {
            let value = Const { value: Value::from(e.raw) };
            Stmt::EmitExpr(at(e, EmitExpr { expr: Expr::Const(at(e, value)) }))
        }
        Stmt::ForLoop(f) => Stmt::ForLoop(at(
            f,
            ForLoop {
                target: target(&f.target),
                iter: expr(&f.iter),
                filter_expr: f.filter_expr.as_ref().map(expr),
                recursive: f.recursive,
                body: body(&f.body)?,
                else_body: body(&f.else_body)?,
            },
        )),
        Stmt::IfCond(i) => Stmt::IfCond(at(
            i,
            IfCond { expr: expr(&i.expr), true_body: body(&i.true_body)?, false_body: body(&i.false_body)? },
        )),
        Stmt::WithBlock(w) => {
            let assignments = w.assignments.iter().map(|(to, from)| (target(to), expr(from))).collect();
            Stmt::WithBlock(at(w, WithBlock { assignments, body: body(&w.body)? }))
        }
        Stmt::Set(s) => {
            let mut value = expr(&s.expr);
            if matches!(s.target, Expr::GetAttr(_)) {
                value = call(&s.expr, PLAIN, vec![value]);
            }
            Stmt::Set(at(s, Set { target: target(&s.target), expr: value }))
        }
        Stmt::SetBlock(s) => {
            let filter = s.filter.as_ref().map(expr);
            Stmt::SetBlock(at(s, SetBlock { target: target(&s.target), filter, body: body(&s.body)? }))
        }
        Stmt::AutoEscape(_) => return Err("autoescape"),
        Stmt::FilterBlock(f) => {
            Stmt::FilterBlock(at(f, FilterBlock { filter: expr(&f.filter), body: body(&f.body)? }))
        }
        Stmt::Block(_) => return Err("block"),
        Stmt::Import(_) | Stmt::FromImport(_) => return Err("import"),
        Stmt::Extends(_) => return Err("extends"),
        Stmt::Include(_) => return Err("include"),
        Stmt::Macro(m) => Stmt::Macro(definition(m)?),
        Stmt::CallBlock(c) => Stmt::CallBlock(at(
            c,
            CallBlock { call: at(&c.call, called(&c.call)), macro_decl: definition(&c.macro_decl)? },
        )),
        Stmt::Continue(c) => Stmt::Continue(at(c, minijinja::machinery::ast::Continue)),
        Stmt::Break(b) => Stmt::Break(at(b, minijinja::machinery::ast::Break)),
        Stmt::Do(d) => Stmt::Do(at(d, Do { call: at(&d.call, called(&d.call)) })),
    })
}

/// Makes a new node at the position of another.
fn at<T, U>(old: &Spanned<T>, new: U) -> Spanned<U> {
    Spanned::new(new, old.span())
}

fn body<'a>(list: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>, &'static str> {
    list.iter().map(statement).collect()
}

fn definition<'a>(m: &Spanned<Macro<'a>>) -> Result<Spanned<Macro<'a>>, &'static str> {
    let (args, defaults) = (m.args.iter().map(target).collect(), m.defaults.iter().map(expr).collect());
    Ok(at(m, Macro { name: m.name, args, defaults, body: body(&m.body)? }))
}

fn call<'a>(place: &Expr<'a>, name: &'static str, args: Vec<Expr<'a>>) -> Expr<'a> {
    let span = place.span();
    let function = Expr::Var(Spanned::new(Var { id: name }, span));
    let args = args.into_iter().map(CallArg::Pos).collect();
    Expr::Call(Spanned::new(Call { expr: function, args }, span))
}

/// Wraps an expression whose value becomes part of a larger one. Constants are no longer than the template.
fn operand<'a>(e: &Expr<'a>) -> Expr<'a> {
    if matches!(e, Expr::Const(_)) { expr(e) } else { call(e, OPERAND, vec![expr(e)]) }
}

fn operands<'a>(list: &[Expr<'a>]) -> Vec<Expr<'a>> {
    list.iter().map(operand).collect()
}

/// Rewrites the targets of an assignment: names, attributes and lists of them.
fn target<'a>(e: &Expr<'a>) -> Expr<'a> {
    match e {
        Expr::List(l) => Expr::List(at(l, List { items: l.items.iter().map(target).collect() })),
        Expr::Tuple(t) => Expr::Tuple(at(t, Tuple { items: t.items.iter().map(target).collect() })),
        other => expr(other),
    }
}

fn called<'a>(c: &Call<'a>) -> Call<'a> {
    Call { expr: expr(&c.expr), args: arguments(&c.args) }
}

fn arguments<'a>(list: &[CallArg<'a>]) -> Vec<CallArg<'a>> {
    let one = |a: &CallArg<'a>| match a {
        CallArg::Pos(e) => CallArg::Pos(operand(e)),
        CallArg::Kwarg(name, e) => CallArg::Kwarg(name, operand(e)),
        CallArg::PosSplat(e) => CallArg::PosSplat(operand(e)),
        CallArg::KwargSplat(e) => CallArg::KwargSplat(operand(e)),
    };
    list.iter().map(one).collect()
}

fn expr<'a>(e: &Expr<'a>) -> Expr<'a> {
    match e {
        Expr::Var(v) => Expr::Var(at(v, Var { id: v.id })),
        Expr::Const(c) => Expr::Const(at(c, Const { value: c.value.clone() })),
        Expr::Slice(s) => {
            let part = |p: &Option<Expr<'a>>| p.as_ref().map(expr);
            let (start, stop, step) = (part(&s.start), part(&s.stop), part(&s.step));
            Expr::Slice(at(s, Slice { expr: expr(&s.expr), start, stop, step }))
        }
        Expr::UnaryOp(u) => {
            // The engine's type cannot be copied.
            let op = if matches!(u.op, UnaryOpKind::Not) { UnaryOpKind::Not } else { UnaryOpKind::Neg };
            Expr::UnaryOp(at(u, UnaryOp { op, expr: expr(&u.expr) }))
        }
        Expr::BinOp(b) => match b.op {
            BinOpKind::Mul => call(e, MUL, vec![operand(&b.left), operand(&b.right)]),
            BinOpKind::Rem => call(e, REM, vec![operand(&b.left), operand(&b.right)]),
            BinOpKind::Add | BinOpKind::Concat => {
                // Constants are wrapped, too: folding would otherwise join them at compile time.
                let side = |e: &Expr<'a>| call(e, OPERAND, vec![expr(e)]);
                Expr::BinOp(at(b, BinOp { op: b.op, left: side(&b.left), right: side(&b.right) }))
            }
            op => Expr::BinOp(at(b, BinOp { op, left: expr(&b.left), right: expr(&b.right) })),
        },
        Expr::Compare(c) => {
            let ops = c.ops.iter().map(|o| CompareOp { op: o.op, expr: expr(&o.expr) }).collect();
            Expr::Compare(at(c, Compare { expr: expr(&c.expr), ops }))
        }
        Expr::IfExpr(i) => Expr::IfExpr(at(
            i,
            IfExpr {
                test_expr: expr(&i.test_expr),
                true_expr: expr(&i.true_expr),
                false_expr: i.false_expr.as_ref().map(expr),
            },
        )),
        Expr::Filter(f) => {
            let input = f.expr.as_ref().map(operand);
            Expr::Filter(at(f, Filter { name: f.name, expr: input, args: arguments(&f.args) }))
        }
        Expr::Test(t) => {
            Expr::Test(at(t, Test { name: t.name, expr: expr(&t.expr), args: arguments(&t.args) }))
        }
        Expr::GetAttr(g) => Expr::GetAttr(at(g, GetAttr { expr: expr(&g.expr), name: g.name })),
        Expr::GetItem(g) => {
            let subscript_expr = expr(&g.subscript_expr);
            Expr::GetItem(at(g, GetItem { expr: expr(&g.expr), subscript_expr }))
        }
        Expr::Call(c) => Expr::Call(at(c, called(c))),
        Expr::List(l) => Expr::List(at(l, List { items: operands(&l.items) })),
        Expr::Tuple(t) => Expr::Tuple(at(t, Tuple { items: operands(&t.items) })),
        Expr::Map(m) => Expr::Map(at(m, Map { keys: operands(&m.keys), values: operands(&m.values) })),
    }
}

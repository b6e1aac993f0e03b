/* Names of attributes, as objects that are made once, and the slots of these attributes in objects of a type. */

#ifndef DIST2_NAMES_H
#define DIST2_NAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <structmember.h>

/* A name, and the address of the pointer to its object. */
typedef struct {
    PyObject **name;
    const char *text;
} Name;

/* Make names; -1 with an exception. */
static inline int
intern(const Name *names, size_t count)
{
    for (size_t each = 0; each < count; each++) {
        *names[each].name = PyUnicode_InternFromString(names[each].text);
        if (*names[each].name == NULL) {
            return -1;
        }
    }
    return 0;
}

/* Return the slot of an attribute in objects of a type; NULL if it has none that C can read there. */
static inline const PyMemberDef *
find_slot(PyTypeObject *type, PyObject *name)
{
    PyObject *member = PyObject_GetAttr((PyObject *)type, name);
    const PyMemberDef *slot = NULL;
    if (member == NULL) {
        PyErr_Clear(); /* objects of the type may have one nevertheless */
    }
    else if (Py_IS_TYPE(member, &PyMemberDescr_Type)) {
        slot = ((PyMemberDescrObject *)member)->d_member; /* the type's */
    }
    Py_XDECREF(member);
    return slot;
}

/* An attribute, mostly of objects of one type: a slot is read from the object's memory. */
typedef struct {
    PyObject *name;
    PyTypeObject *type; /* of the object that was asked last */
    Py_ssize_t offset;
    int kind; /* of the slot: -1 if it is none */
    char fixed;
} Field;

/* Return the address of an attribute, if it is a slot of a kind (T_OBJECT_EX: an object); NULL if it is none. */
static inline void *
field_at(PyObject *object, Field *field, int kind)
{
    if (Py_TYPE(object) != field->type) {
        const PyMemberDef *slot = find_slot(Py_TYPE(object), field->name);
        field->kind = slot == NULL ? -1 : slot->type;
        field->offset = slot == NULL ? 0 : slot->offset;
        field->fixed = slot != NULL && (slot->flags & READONLY) != 0;
        Py_XSETREF(field->type, (PyTypeObject *)Py_NewRef(Py_TYPE(object)));
    }
    return field->kind == kind ? (char *)object + field->offset : NULL;
}

/* Read an attribute. */
static inline PyObject *
get_attribute(PyObject *object, Field *field)
{
    PyObject **slot = (PyObject **)field_at(object, field, T_OBJECT_EX);
    return slot != NULL && *slot != NULL ? Py_NewRef(*slot) : PyObject_GetAttr(object, field->name);
}

#endif

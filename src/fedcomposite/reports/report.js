const tip=document.getElementById('tip'),traces=[...document.querySelectorAll('path.trace')];
for(const t of traces){t.style.strokeWidth=2.4;
t.addEventListener('mousemove',e=>{tip.textContent=t.dataset.name;tip.style.display='block';
tip.style.left=e.clientX+14+'px';tip.style.top=e.clientY+10+'px';
for(const o of traces)o.classList.toggle('faded',o!==t)});
t.addEventListener('mouseleave',()=>{tip.style.display='none';for(const o of traces)o.classList.remove('faded')})}
